"""Needle in a haystack: an essay hides a fact at some depth, and a question follows that only the fact answers.

The whole prompt goes through the cache in chunks, so the tokens of the question attend to the packed fact. (After an
unpacked prefill the first answer token would be exact with every cache.) A needle counts as found if greedy decoding
would write the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import DynamicCache

from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.cache.served_models import longest_text
from hf_lowbit_kv.eval.chunked_reader import FULL, Reader, Text, packs
from hf_lowbit_kv.eval.local_models import essay
from hf_lowbit_kv.eval.texts import read_text
from hf_lowbit_kv.installation import need

CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Delhi", "Rome", "Berlin", "Madrid")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (512, 1024, 2048)


class Needle(NamedTuple):
    """The secret code of a city."""

    city: str
    code: str

    @classmethod
    def numbered(cls, number: int) -> Needle:
        """The needle with this number. Codes have four digits."""
        return cls(CITIES[number % len(CITIES)], str(1000 + 7919 * (number + 1) % 9000))

    @property
    def fact(self) -> str:
        return f"The secret code of {self.city} is {self.code}."

    @property
    def question(self) -> str:
        return f"\n\nQuestion: What is the secret code of {self.city}?\nAnswer: The secret code of {self.city} is"


def clean(text: str) -> str:
    """The text in one line, with single spaces."""
    return " ".join(text.split())


def prompt(haystack: str, depth: float, needle: Needle) -> str:
    """The haystack with the fact in it, and the question. The haystack is cut after its last whole sentence. The fact
    follows the sentence that ends nearest to `depth` (0 to 1). In a haystack without sentences, words serve as
    sentences."""
    sentences = [match.end() for match in re.finditer(r"[.?!]\s|[。？！]", haystack)]
    ends = [0, *(sentences or [match.end() for match in re.finditer(r"\s", haystack)])]
    haystack = haystack[: ends[-1]]
    cut = min(ends, key=lambda end: abs(end - depth * len(haystack)))
    before, after = haystack[:cut].strip(), haystack[cut:].strip()
    return " ".join(part for part in (before, needle.fact, after) if part) + needle.question


def run(
    presets: Sequence[str],
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    trials: int = 1,
    text: str | Path | None = None,
    chunk: int = 128,
    batch_size: int = 8,
    report: Callable[[str], None] = lambda step: None,
    overrides: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Look for needles through the full-precision cache and each preset.

    Args:
        presets: names of presets. `"full"`, transformers' own cache, is always measured first.
        model: a causal language model with `attn_implementation="lowbit_kv"`.
        lengths: approximate tokens of a prompt.
        depths: depths of the fact in the prompt, 0 (start) to 1 (end).
        trials: needles at each depth, with different cities and codes.
        text: file that hides the facts; `None`: an essay.
        report: called with a name when each step begins. There are `steps(presets, lengths)` steps.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        One dict for each preset, length and depth: `preset`, `length`, `depth`, `found` (share of the needles, 0 to 1),
        `logprob` (log-probability of the whole code, nats, mean over needles), `packed_share`.

    Raises:
        ValueError: an unknown preset, a length beyond the text or the model's context, a depth outside 0 to 1, or a length
            at which nothing is read packed.
    """
    if bad := [depth for depth in depths if not 0 <= depth <= 1]:
        raise ValueError(f"depths={bad} are not allowed; they must be 0 (start) to 1 (end)")
    caches: dict[str, Callable[[], Any]] = {FULL: lambda: DynamicCache(config=model.config)}
    for preset in presets:
        if preset != FULL:
            caches[preset] = partial(from_preset, preset, model, **(overrides or {}))
            caches[preset]()  # raises if the preset does not fit the model; nothing is allocated
    path = Path(text) if text is not None else essay("worked")
    texts = {length: _texts(path, tokenizer, model, length, depths, trials) for length in lengths}
    rows = []
    for preset, make_cache in caches.items():
        for length in lengths:
            report(f"{preset} {length}")
            reader = Reader(model, make_cache, chunk, batch_size)
            scores = reader.score(texts[length])
            if preset != FULL and reader.share.packed == 0 and packs(make_cache().spec):
                raise ValueError(
                    f"length={length} is too short for preset {preset!r} with kv_chunk={chunk}: nothing was read packed, so "
                    "the result would say nothing about it"
                )
            for index, depth in enumerate(depths):
                cell = scores[index * trials : (index + 1) * trials]
                share = sum(score.greedy for score in cell) / trials
                logprob = sum(score.logprob for score in cell) / trials
                row = {"preset": preset, "length": length, "depth": depth, "found": share, "logprob": logprob}
                rows.append(row | {"packed_share": None if preset == FULL else reader.share.value})
    return rows


def steps(presets: Sequence[str], lengths: Sequence[int]) -> int:
    """How many times `run` calls `report`."""
    return len({FULL, *presets}) * len(lengths)


def _texts(path: Path, tokenizer: Any, model: Any, length: int, depths: Sequence[float], trials: int) -> list[Text]:
    """Prompts of at most `length` tokens, with their codes, in the order of depths."""
    limit = longest_text(model.config)
    if limit is not None and length > limit:
        raise ValueError(f"length={length} is more than the model's context of {limit} tokens")
    whole = clean(read_text(path).content)
    needles = [Needle.numbered(number) for number in range(len(depths) * trials)]
    extra = max(len(_ids(tokenizer, f" {needle.fact}{needle.question} {needle.code}")) for needle in needles)
    ids = _ids(tokenizer, whole)
    if extra >= length:
        raise ValueError(f"length={length} is too short: fact and question take {extra} tokens")
    if len(ids) < length - extra:
        raise ValueError(f"text {str(path)!r} has {len(ids)} tokens, and length={length} needs {length - extra} of it")
    haystack = tokenizer.decode(ids[: length - extra])
    texts = []
    for number, needle in enumerate(needles):
        question = prompt(haystack, depths[number // trials], needle)
        start = len(_ids(tokenizer, question))
        texts.append(Text(_ids(tokenizer, f"{question} {needle.code}"), start))
    return texts


def _ids(tokenizer: Any, text: str) -> list[int]:
    # no warning about the model's maximal length: longer texts are cut anyway
    return tokenizer(text, verbose=False).input_ids


# ---- heat maps -------------------------------------------------------------------------------------------------------


def heat_map(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The results as a table: a row for each preset and depth, a column for each length. A cell shows the share of
    needles found. In brackets follows the mean log-probability of the code, which says more than found or not."""
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for row in rows:
        start = {"preset": row["preset"], "depth": f"{row['depth']:.0%}"}
        line = lines.setdefault((row["preset"], row["depth"]), start)
        line[str(row["length"])] = f"{row['found']:.0%} ({row['logprob']:.1f})"
    return list(lines.values())


def check_picture(path: Path) -> None:
    """Raise before the measurement if the picture could not be written."""
    need("--picture", "eval", "matplotlib")
    if not path.parent.is_dir():
        raise ValueError(f"--picture {str(path)!r}: there is no folder {str(path.parent)!r}")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the heat maps of all presets side by side, as a PNG. The colour shows the log-probability of the code. A
    cross marks a length and depth at which some needles were not found."""
    from matplotlib.figure import Figure

    presets = list(dict.fromkeys(row["preset"] for row in rows))
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    lowest = min(row["logprob"] for row in rows)
    figure = Figure(figsize=(1.6 + 0.7 * len(lengths) * len(presets), 1.4 + 0.42 * len(depths)), layout="constrained")
    axes = figure.subplots(1, len(presets), sharey=True, squeeze=False)[0]
    for axis, preset in zip(axes, presets, strict=True):
        cells = {(row["depth"], row["length"]): row for row in rows if row["preset"] == preset}
        grid = [[cells[depth, length]["logprob"] for length in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=lowest, vmax=0, cmap="viridis", aspect="auto")
        for y, depth in enumerate(depths):
            for x, length in enumerate(lengths):
                if cells[depth, length]["found"] < 1:
                    axis.plot(x, y, "x", color="white", markersize=7)
        axis.set_title("full precision" if preset == FULL else preset, fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8, rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
    axes[0].set_ylabel("depth of the fact", fontsize=9)
    figure.supxlabel("tokens of the prompt", fontsize=9)
    bar = figure.colorbar(image, ax=list(axes), pad=0.02)
    bar.set_label("log-probability of the code (nats)", fontsize=8)
    figure.savefig(path, dpi=150)
