"""The project's accuracy records: `python -m hf_lowbit_kv.eval.measure` (`make measure`).

Measures every preset on three texts, one record a preset and text. What is recorded already is skipped: the same preset, text
and setting, and the same stored bytes. Records go to `eval/results/accuracy-smollm2.jsonl`; `make results` renders them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import LlamaConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.fitting import fitting_presets
from hf_lowbit_kv.eval.models import BUNDLED_MODEL, load_model
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.results import append_record, provenance, read_records, results_path, run_command
from hf_lowbit_kv.eval.texts import Text, essay_text, transcript
from hf_lowbit_kv.layer import ATTENTION_NAME, LowBitLayer

OUT = results_path("accuracy", "smollm2")
#: the texts, in the order in which they are measured
TEXTS: dict[str, Callable[[], Text]] = {
    "transcript": transcript,
    "worked.txt": lambda: essay_text("worked"),
    "popular.txt": lambda: essay_text("popular"),
}
#: what is measured beside the presets that are listed: the ablations that their suffixes allow
ABLATIONS = (
    *("kivi-4-sink", "kv4-sink", "kivi-2-hadamard-sink"),
    *("kitty-variance", "kitty-random", "kitty-pro-variance", "kitty-pro-random", "kitty-pro-hadamard"),
)
CONTEXT, START, CHUNK = 4096, 512, 128
#: presets that go through a text side by side; a record is written when all of them are done
TOGETHER = 6
#: what the bundled model's layers look like
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
#: tokens whose stored bytes stand for a preset's definition
PROBE_TOKENS = 700


def candidates(model: Any) -> list[str]:
    """Every preset that the records must hold."""
    return list(dict.fromkeys([*fitting_presets(model)[0], *ABLATIONS]))


def definition(preset: str) -> str:
    """A hash of what the preset stores of fixed random tokens in a layer of the bundled model's shape: it changes with the
    definition of a format, a transform or a window."""
    config = LlamaConfig(**SHAPE)
    config._attn_implementation = ATTENTION_NAME
    generator = torch.Generator().manual_seed(0)
    shape = 1, SHAPE["num_key_value_heads"], PROBE_TOKENS, SHAPE["head_dim"]
    spec = lb.get_preset(preset).spec()
    asked = spec.parameters(shape[3], shape[3], shape[1])
    given = {name: (torch.randn(sizes, generator=generator).abs() + 0.5).to(dtype) for name, sizes, dtype in asked}
    layer = LowBitLayer(spec, config, shape[1], backend="cpu", parameters=given)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    layer.update(k, v)
    layer.step(k.repeat_interleave(SHAPE["num_attention_heads"] // shape[1], 1), k, v, None, 1.0, None, None)
    assert layer.store is not None
    state, digest = layer.store.state, hashlib.sha256()
    for tensor in (*state.pool, state.sink_k, state.sink_v, state.tail_k, state.tail_v):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def setting(dtype: str = "float32") -> dict[str, Any]:
    """What every record of a run has in common, and what tells it from records of another setting."""
    return {
        "model": BUNDLED_MODEL,
        "context": CONTEXT,
        "start": START,
        "chunk": CHUNK,
        "dtype": dtype,
    }


def missing(records: Iterable[dict[str, Any]], definitions: dict[str, str], texts: Iterable[str]) -> list[tuple]:
    """`(text, preset)` of what no record of the present setting and definition holds."""
    same = setting()
    held = {
        (record["text"], record["preset"], record["definition"])
        for record in records
        if all(record.get(key) == value for key, value in same.items())
    }
    return [
        (text, preset)
        for text in texts
        for preset, definition in definitions.items()
        if (text, preset, definition) not in held
    ]


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Preset, repeatable [default: all].")] = None,
    text: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TEXTS)} [default: all].")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Records to add at most.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Only tell what is missing.")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Measure what no record holds yet."""
    if unknown := [name for name in text or [] if name not in TEXTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not known; allowed: {', '.join(TEXTS)}", param_hint="--text")
    console = Console(stderr=True)
    model, tokenizer = load_model(None, torch.float32, "cpu")
    definitions = {name: definition(name) for name in preset or candidates(model)}
    todo = missing(read_records(out), definitions, text or TEXTS)[:limit]
    console.print(f"{len(todo)} records to add")
    if dry_run:
        print(json.dumps(todo))
        return
    source = provenance(commit)
    for name in TEXTS:
        same: dict[str, list[str]] = {}  # presets that store the same are measured once
        for each in (each for of, each in todo if of == name):
            same.setdefault(definitions[each], []).append(each)
        # those with the same sink go through the text in the same chunks, and share a full-precision pass
        order = sorted(same, key=lambda stored: lb.get_preset(same[stored][0]).sink)
        for first in range(0, len(order), TOGETHER):
            group = order[first : first + TOGETHER]
            found = _measure(name, [same[stored][0] for stored in group], model, tokenizer)
            for stored, record in zip(group, found, strict=True):
                for each in same[stored]:
                    record |= {"preset": each, "definition": stored, **setting(), "device": "cpu", **source}
                    append_record(out, record)
                console.print(f"{name}: {', '.join(same[stored])}, KL {record['kl']:.5f}")


def _measure(text: str, presets: list[str], model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    content = TEXTS[text]()
    factories = {preset: functools.partial(lb.from_preset, preset, model, backend="cpu") for preset in presets}
    found = score(factories, [content], model, tokenizer, CONTEXT, START, CHUNK)
    edges = position_edges(START, CONTEXT)
    return [{"preset": preset, "text": text} | mean_row(scores, edges) for preset, scores in found.items()]


if __name__ == "__main__":
    run_command(main)
