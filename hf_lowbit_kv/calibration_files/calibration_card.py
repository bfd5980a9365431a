"""Uploads calibrations to a hub, with a card that shows their source and measured accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

#: fields of a run of `calibrate` -> their headings on the card
RUN_FIELDS = {
    "presets": "presets",
    "texts": "texts",
    "text_hashes": "SHA-256 of the texts, beginning",
    "samples": "windows",
    "length": "tokens per window",
    "seed": "seed",
    "mix": "share of unweighted statistics",
    "power": "power of errors by which steps of 4 bits and more are chosen (2 before)",
    "gradients": "gradients",
    "attention": "weighted by attention",
    "versions": "versions",
}
#: fields of a measured preset -> their headings on the card
PRESET_FIELDS = {
    "preset": "preset",
    "bits_per_value": "bits",
    "kl": "KL, nats",
    "top1": "same next token",
    "text": "text",
}


def card(calibration: Any, measured: Sequence[Mapping[str, Any]] = ()) -> str:
    """A model card in Markdown: the model, the calibration runs, and measured accuracy.

    Args:
        calibration: a `Calibration`.
        measured: one mapping per preset, as `hf-lowbit-kv eval perplexity --json` prints them: `preset`,
            `bits_per_value`, `kl`, `top1` and `text`, the name of the text. The text must not be one of the calibration.

    Raises:
        ValueError: a mapping names a text that the calibration has used.
    """
    texts = {str(text) for run in calibration.source for text in _as_list(run.get("texts"))}
    for row in measured:
        if (text := str(row.get("text", ""))) in texts:
            raise ValueError(f"measured has text={text!r}, which the calibration has used: measure on another text")
    data = ModelCardData(library_name="hf-lowbit-kv", tags=["kv-cache", "quantization", "calibration"])
    name = calibration.model["name"]
    presets = sorted({preset for run in calibration.source for preset in _as_list(run.get("presets"))})
    preset = presets[0] if presets else "eigen-2"
    lines = [
        f"# Calibration of low-bit KV caches for {name}",
        "",
        "For `hf-lowbit-kv`: the parameters that calibrated presets need for this model. It contains no weights.",
        "",
        "```python",
        "import hf_lowbit_kv as lb",
        "",
        f'cache = lb.from_preset("{preset}", model, calibration="THIS_REPOSITORY")',
        "```",
        "",
        "## Model",
        "",
        f"{name} (`{calibration.model['model_type']}`), {len(calibration.model['layers'])} packed layers. Other weights are "
        "rejected.",
        "",
        "## Contents",
        "",
        *(f"- {part}" for part in calibration.contents()),
        "",
        "## Source",
        "",
        *_table(
            [{title: _text(run[key]) for key, title in RUN_FIELDS.items() if key in run} for run in calibration.source]
        ),
    ]
    if measured:
        rows = [{title: _text(row[key]) for key, title in PRESET_FIELDS.items() if key in row} for row in measured]
        lines += ["", "## Accuracy on a text not used for calibration", "", *_table(rows)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def push_to_hub(
    calibration: Any,
    file_name: str,
    repo_id: str,
    *,
    measured: Sequence[Mapping[str, Any]] = (),
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload a calibration as `file_name`, with its card. See `Calibration.push_to_hub`."""
    page = ModelCard(card(calibration, measured).replace("THIS_REPOSITORY", repo_id), ignore_metadata_errors=False)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        calibration.save(Path(folder, file_name))
        page.save(Path(folder, "README.md"))
        message = commit_message or f"Calibration for {calibration.model['name']}"
        return str(
            api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message).commit_url
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _table(rows: Iterable[Mapping[str, str]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return ["Unknown: an early version made this file."]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[row.get(heading, "").replace("|", "\\|") for heading in headings] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *cells)]
