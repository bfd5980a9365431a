"""Texts to measure on: files, or documents from the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.installation import need

#: file endings, and the names of the loaders that `datasets` has for them
LOADERS = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet", "txt": "text", "arrow": "arrow"}
#: characters to read for each needed token: more than the characters per token of any common tokenizer
CHARACTERS_PER_TOKEN = 20


class Text(NamedTuple):
    """A text with a name."""

    name: str
    content: str


def read_text(source: str | Path | Text) -> Text:
    """Read a file. A `Text` is returned unchanged.

    Raises:
        ValueError: the file is not UTF-8.
        OSError: the file cannot be read.
    """
    if isinstance(source, Text):
        return source
    try:
        return Text(Path(source).name, Path(source).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"text {str(source)!r} is not UTF-8: {error}") from error


def dataset_text(
    name: str,
    config: str | None = None,
    split: str = "test",
    column: str = "text",
    tokens: int = 4096,
) -> Text:
    """Documents of a dataset as one text, separated by blank lines.

    Args:
        name: a hub name, a folder, or a file that `datasets` can load (`.jsonl`, `.csv`, `.parquet`, `.txt`).
        config, split: as for `datasets.load_dataset`. For a file `split` is ignored, because its only split is
            `"train"`.
        column: the column with the documents.
        tokens: how many tokens are needed. Reading stops when there are enough characters for them.

    Raises:
        MissingPackageError: `datasets` is not installed.
        ValueError: there is no such column or split. Others: `datasets` cannot load the dataset.
    """
    rows = iter(_load(name, config, split))
    documents = _documents(rows, name, column, tokens * CHARACTERS_PER_TOKEN)
    shown = Path(name).name if Path(name).exists() else "/".join(part for part in (name, config, split) if part)
    return Text(shown, "\n\n".join(documents))


def _load(name: str, config: str | None, split: str) -> Iterable[dict[str, Any]]:
    need("--dataset", "eval", "datasets")
    import datasets

    path = Path(name)
    if not path.is_file():
        return datasets.load_dataset(name, config, split=split, streaming=True)
    if (loader := LOADERS.get(path.suffix.removeprefix("."))) is None:
        raise ValueError(f"dataset {name!r} is no file that can be read; allowed: {', '.join(LOADERS)}")
    return datasets.load_dataset(loader, data_files=str(path), split="train", streaming=True)


def _documents(rows: Iterable[dict[str, Any]], name: str, column: str, enough: int) -> Sequence[str]:
    documents, characters = list[str](), 0
    for row in rows:
        if not isinstance(row.get(column), str):
            texts = [key for key, value in row.items() if isinstance(value, str)]
            raise ValueError(f"column {column!r} of dataset {name!r} holds no text; columns with text: {texts}")
        documents.append(row[column])
        characters += len(row[column])
        if characters >= enough:
            break
    return documents
