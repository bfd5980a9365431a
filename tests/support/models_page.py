"""Writes `docs/models.md`, the supported models: `python tests/support/models_page.py` (about an hour on
a CPU).

For every decoder architecture of transformers, a small model with random weights writes after a prompt of 90 tokens: by
`model.generate` with a cache in the model's dtype, growing and preallocated, by `lb.generate`, and under `lb.enable`. Its
logits are compared with those of transformers' own cache. Refused architectures are shown with the reason.
"""

import copy
import functools
import inspect
import logging
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from tiny_architectures import (
    IMAGE_TOKEN,
    VISION_ARCHITECTURES,
    names,
    prompt_with_image,
    tiny_model,
    tiny_vision_model,
)
from transformers import CONFIG_MAPPING, DynamicCache, LogitsProcessor

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.native_layers import SLIDING, native_layers
from hf_lowbit_kv.eval.benchmarks.result_files import markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS, run_command
from hf_lowbit_kv.generation.fused_pieces import Piece
from hf_lowbit_kv.generation.piece_finder import find_pieces
from hf_lowbit_kv.planning.model_shapes import known_models
from hf_lowbit_kv.presets import DEFAULT_PRESET
from hf_lowbit_kv.storage.model_sides import DIRECT

PAGE = RESULTS.parents[1] / "docs" / "models.md"
#: most seconds for one architecture, and most parameters of its small model
SECONDS, LARGEST = 180, 100_000_000
#: largest difference of logits from those of transformers' own cache, relative to their standard deviation
TOLERANCE = 2e-3
#: tokens of a prompt, of which the second row has so many of padding; and those that are written
TOKENS, PADS, WRITTEN = 90, 5, (7, 11, 13)
#: inputs that say of what kind a token is: 0 is text
KINDS = ("token_type_ids", "mm_token_type_ids")
#: small pages, which 90 tokens fill
SMALL: dict[str, Any] = {"page_size": 32, "residual": 32, "backend": "torch"}


PAGE_TEXT = """# Supported models

{served} of the {tried} decoder architectures of transformers {version} are supported.
Search this page for the `model_type` of your model: `model.config.model_type`, or the field in its `config.json`.

## Popular model families

| column | meaning |
|---|---|
| packed | how many layers store packed tokens; [more](#supported) |
| head_dim | channels of a head in these layers, of keys / values where they differ; other sizes of a family may have others |
| preset | the one to begin with. [How much it loses](choose.md#will-it-break-my-model); [other presets](choose.md) |

{families}
Some configurations of {all_sliding} set `sliding_window`, for example
Mistral-7B-v0.1 and Phi-3-mini-4k. Then all layers are sliding: nothing is packed, and making a cache raises an error.
`from_pretrained(..., sliding_window=None)` loads such a model with full attention: texts of up to `sliding_window` tokens are
computed as before.

## Supported

| column | meaning |
|---|---|
| packed | how many layers of the tested model pack tokens. The others (sliding, linear, recurrent) keep transformers' own |
| fused | which parts of a recorded step fused kernels compute ([how](dev/recording.md#fused-pieces)) |
| calibrated | whether calibrated presets (`eigen-*`, `vecinfer-*`) work; most `eigen-*` do not with head_dim 80 or 96 |

In Gemma 3n and the small sizes of Gemma 4 the last layers attend to keys and values of earlier layers, and store none. So
the newest tokens are stored when the last of these layers has attended. All ways to generate work with them.

{generation} [`lb.generate_many`](many-requests.md#which-models)
and the server work with those that have no linear or recurrent layers. With transformers before 5.20 preallocated
caches, and with them `lb.generate`, fail in Llama 4: its masks get an argument that they do not take.

{served_table}
## Text and images

These vision-language models accept a text with an image. Tokens of the image are stored like those of text. The
vision tower keeps its own attention. The table above has only the text models of such architectures.

{image_table}
Models of the Qwen-VL kind keep positions outside of their cache (`rope_deltas`). A low-bit cache remembers those of its
text. `lb.generate` and enabled models restore them in the model before the text continues: after other texts, in a fork,
or in another process. A plain `model.generate` that would continue with another text's positions raises an error.

## RoPE that changes with the length

Rotary embeddings of the kinds `longrope` and `dynamic` change at a length: `original_max_position_embeddings` tokens for
`longrope`, `max_position_embeddings` for `dynamic`. Stored keys keep the embeddings with which they were computed. Below
that length there is no difference. For a text that passes it:

| call | what happens |
|---|---|
| one call of `lb.generate`, or of an enabled model | as with transformers' cache; automatic chunks do not change the result |
| `lb.Chat` | prefills the whole conversation again in that turn; with `dynamic`, in every later turn too |
| `PrefixStore` | shares prefixes on the same side of that length; with `dynamic`, only below it |
| `cache.fork()` | a fork that would pass it raises an error: `reset()` it |
| `lb.generate_many`, the server | reject a request that may pass it |
| your own `prefill_chunk_size`, a further turn with `cache=` | as with transformers' cache, with a warning: another answer |

Phi's models (`phi3`, `phimoe`, `phi4_multimodal`) drop their cache when a text grows beyond
`original_max_position_embeddings` (4096 tokens in Phi-3.5 and Phi-4-mini), and continue in full precision. `lb.generate` and
enabled models keep the low-bit cache: the step that passes the length prefills the whole text again, once. A plain
`model.generate(past_key_values=cache)` loses the cache at that length, so creating a cache for such a model warns.
Beyond that length prompt lookup and assisted decoding give other tokens, as they do with transformers' own cache.

## Not supported

These models raise an error with the reason, when their cache is made or in their first forward pass.

{refused_table}
## Not tried

No small model of these could be created, or transformers' own cache cannot run it:
{untried}.
`python tests/support/models_page.py --only NAME` prints the reason.

## How these models are tested

`python tests/support/models_page.py` wrote this page. It makes a small model of each architecture, with
random weights and every kind of layer; published hybrid models may have other shares of them. `model.generate` gets two
rows, one of them padded, with all inputs
that a tokenizer or processor returns, and generates {new} tokens: with a growing and with a preallocated cache without
compression. `lb.generate` and an enabled model do the same. Logits must equal those with transformers' own cache, up
to {tolerance:g} of their standard deviation. Vision-language models get their image as pixel values.
"""
#: kinds of layers that are packed, as configurations name them
PACKED_KINDS = ("full_attention", "attention")
#: families by the names that people know, with the `model_type` of their text model
FAMILIES = {
    "Llama 2, 3": "llama",
    "Llama 4": "llama4_text",
    "Qwen 2.5": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3 30B-A3B, 235B-A22B": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5_text",
    "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B": "qwen3_5_moe_text",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text",
    "Gemma 3n": "gemma3n_text",
    "Gemma 4": "gemma4",
    "Mistral, Mistral Small": "mistral",
    "Ministral 3": "ministral3",
    "Mixtral": "mixtral",
    "Phi-3, Phi-4": "phi3",
    "gpt-oss": "gpt_oss",
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3, R1": "deepseek_v3",
    "GLM-4.5, GLM-4.6": "glm4_moe",
    "SmolLM3": "smollm3",
    "OLMo 3": "olmo3",
    "Granite 3": "granite",
    "MiniMax-M2": "minimax_m2",
    "MiMo-V2-Flash": "mimo_v2_flash",
}
#: how the page names the reason of an error: a pattern in the message, and the page's words
REASONS = (
    ("does not use transformers' attention interface", "the model does not use transformers' attention interface"),
    (
        "has no layer with only full attention",
        "no layer has full attention and nothing else, so there is nothing to pack",
    ),
    ("is sparse attention", "sparse attention: an indexer chooses the tokens to attend to"),
    ("computes with them before it attends", "the model computes with keys and values after it has stored them"),
    ("takes no cache but its own", "the model takes no cache but one of its own class"),
    ("several stacks of layers", "the model has several stacks of layers"),
    ("cross-attention layers", "the model reads the keys of cross-attention layers from its cache"),
    ("runs some layers several times", "some layers run several times in a pass, each time with other keys and values"),
    ("of the model that it assists", "an assistant: it attends to the keys and values of the model that it assists"),
    (r"head_dim=(\d+) is not supported", r"head_dim \1 is not supported"),
)


class ModelRow(NamedTuple):
    """Results for an architecture. served: "every layer", "1 of 6 layers", or "" if it is refused; then `why` has the
    reason. generates: "yes", or which ways to generate fail, and why. image_tokens: of the prompt, for a vision-language one;
    nothing is fused or calibrated there."""

    name: str
    served: str
    generates: str = ""
    fused: str = ""
    calibrated: str = ""
    why: str = ""
    image_tokens: int = 0


class _Writes(LogitsProcessor):
    """Whatever the model thinks, these tokens are written: logits of two runs are of the same text."""

    def __init__(self, tokens: Sequence[int], start: int):
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[input_ids.shape[1] - self.start]
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)


def _written(generate: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits `[rows * NEW, vocabulary]` of the tokens that are written after these inputs."""
    writes = _Writes(WRITTEN, inputs["input_ids"].shape[1])
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": len(WRITTEN),
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True, "logits_processor": [writes]}
    return torch.cat(generate(**inputs, **options).logits)


def _text(model: Any) -> dict[str, torch.Tensor]:
    """What a tokenizer returns for two texts, one of them padded, if the model takes all of it."""
    ids = torch.randint(3, 150, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADS], ids[1, :PADS] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    kinds = {name: torch.zeros_like(ids) for name in KINDS if name in inspect.signature(model.forward).parameters}
    return inputs | kinds


def _with_cache(model: Any, cache: Any) -> Callable[..., Any]:
    return lambda **inputs: model.generate(**inputs, **as_argument(cache))


def _generates(model: Any, preset: str, inputs: Mapping[str, torch.Tensor], expected: torch.Tensor) -> str:
    """ "yes", or which ways to generate fail besides a growing cache, and why."""

    def under_lb_enable(**inputs: Any) -> Any:
        with lb.enable(model, preset, **SMALL):
            return model.generate(**inputs)

    ways: dict[str, Callable[..., Any]] = {
        "preallocated": lambda **x: _with_cache(model, lb.from_preset(preset, model, max_cache_len=160, **SMALL))(**x),
        "`lb.generate`": functools.partial(lb.generate, model, preset=preset, cache_options=SMALL, progress=False),
        "`lb.enable`": under_lb_enable,
    }
    failing = list[str]()
    for way, generate in ways.items():
        try:
            difference = _apart(_written(generate, inputs), expected)
        except Exception as error:
            failing.append(f"{way}: {_short(error)}")
            continue
        if not difference < TOLERANCE:
            failing.append(f"{way}: its logits differ by {difference:.2g} of their standard deviation")
    lb.release(model)
    return "; ".join(failing) or "yes"


def _apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, relative to their standard deviation."""
    return float((logits - expected).abs().max() / expected.std())


def examine(name: str) -> ModelRow:
    """Try one architecture."""
    return _limited(_examined, name)


def examine_with_image(name: str) -> ModelRow:
    """Try one vision-language architecture on text and an image."""
    return _limited(_examined_with_image, name)


def _limited(examined: Callable[[str], ModelRow], name: str) -> ModelRow:
    """In at most `SECONDS`."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return examined(name)
    except Exception as error:
        return ModelRow(name, "", why=f"not tried: {_short(error)}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _examined(name: str) -> ModelRow:
    theirs = tiny_model(name)
    if (count := sum(parameter.numel() for parameter in theirs.parameters())) > LARGEST:
        return ModelRow(name, "", why=f"not tried: even a small one has {count} parameters")
    inputs = _text(theirs)
    try:
        expected = _written(_with_cache(theirs, DynamicCache(config=theirs.config)), inputs)
    except Exception as error:
        expected, failure = None, error
    ours = copy.deepcopy(theirs)
    try:
        cache = _cache(ours)
    except (TypeError, ValueError) as error:
        return ModelRow(name, "", why=_short(error))
    if expected is None:
        return ModelRow(
            name, "", why=f"not tried: transformers' own cache fails on the small model ({_short(failure)})"
        )
    row = _compared(name, ours, cache, inputs, expected)
    return row._replace(fused=_fused(ours), calibrated=_calibrated(ours, cache)) if row.served else row


def _examined_with_image(name: str) -> ModelRow:
    theirs = tiny_vision_model(name)
    prompt = prompt_with_image(theirs)
    ours = copy.deepcopy(theirs)
    inputs = {"input_ids": prompt.ids, "attention_mask": torch.ones_like(prompt.ids), **prompt.image}
    expected = _written(_with_cache(theirs, DynamicCache(config=theirs.config)), inputs)
    # the test proves nothing if the model ignores the image
    other = {**inputs, "pixel_values": -prompt.image["pixel_values"]}
    blind = _written(_with_cache(theirs, DynamicCache(config=theirs.config)), other)
    if not _apart(blind, expected) > TOLERANCE:
        return ModelRow(name, "", why="not tried: the small model does not see its image")
    try:
        row = _compared(name, ours, _cache(ours), inputs, expected)
    except Exception as error:
        row = ModelRow(name, "", why=_short(error))
    return row._replace(image_tokens=int((prompt.ids == IMAGE_TOKEN).sum()))


def _compared(name: str, ours: Any, cache: lb.LowBitCache, inputs: Mapping, expected: torch.Tensor) -> ModelRow:
    """What is written with this cache, and in the other ways to generate."""
    ours.set_attn_implementation(lb.ATTENTION_NAME)
    try:
        logits = _written(_with_cache(ours, cache), inputs)
    except Exception as error:
        return ModelRow(name, "", why=_short(error))
    if not (difference := _apart(logits, expected)) < TOLERANCE:
        return ModelRow(name, "", why=f"its logits differ by {difference:.2g} of their standard deviation")
    packed, layers = len(cache.packed_layers), len(cache.layers)
    served = "every layer" if packed == layers else f"{packed} of {layers} layers"
    return ModelRow(name, served, _generates(ours, cache.preset or "dense", inputs, expected))


def _cache(model: Any) -> lb.LowBitCache:
    """A growing cache in the model's dtype."""
    try:
        return lb.from_preset("dense", model, **SMALL)
    except ValueError as error:
        if "latent" not in str(error):
            raise
        return lb.from_preset("mla", model, **SMALL)


def _fused(model: Any) -> str:
    """Pieces of a recorded step that fused kernels can compute, e.g. `norms 5, rotary 2, gate 2, products 4`."""
    counts = Counter(piece.kind for piece in find_pieces(model) if isinstance(piece, Piece))
    return ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "none"


def _calibrated(model: Any, cache: lb.LowBitCache) -> str:
    if any(layer.spec.attention_kind.name == "latent" for layer in cache.packed_layers):
        return "no: latents"
    spec = lb.get_preset("eigen-2").spec()
    try:
        for heads, first, second in cache.packed_sizes.values():
            if heads is None or first is None or second is None:
                return "unknown sizes"
            spec.validate(first, second)
    except ValueError as error:
        return _short(error)
    return "yes"


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}" if not text else text if len(text) <= 160 else text[:157] + "..."


def render(rows: list[ModelRow], with_images: Sequence[ModelRow]) -> str:
    """The page. Architectures with the same results stand in one row of a table."""
    served = [row for row in rows if row.served]
    untried = [row for row in rows if row.why.startswith("not tried")]
    refused = [row for row in rows if not row.served and row not in untried]
    exceptions = "".join(f", except `{row.name}` ({row.generates})" for row in served if row.generates != "yes")
    images = [(row.served or f"no: {row.why}", row.generates) for row in with_images]
    return PAGE_TEXT.format(
        families=_families({row.name: row for row in served}),
        all_sliding=all_sliding(row.name for row in served),
        served=len(served),
        tried=len(rows),
        version=transformers.__version__,
        generation="Growing and preallocated caches, `lb.generate` and `lb.enable` work with all models of the table"
        f"{exceptions}.",
        served_table=_grouped(
            ("packed", "fused", "calibrated"),
            ((row.name, (row.served, _kinds(row.fused), row.calibrated)) for row in served),
        ),
        image_table=_grouped(
            ("packed", "all ways to generate"), zip((row.name for row in with_images), images, strict=True)
        ),
        refused_table=_grouped(("why",), ((row.name, (reason(row.why),)) for row in refused)),
        untried=", ".join(f"`{row.name}`" for row in untried) or "none",
        tolerance=TOLERANCE,
        new=len(WRITTEN),
    )


def _families(served: Mapping[str, ModelRow]) -> str:
    cells = []
    for family, name in FAMILIES.items():
        if name in served:
            cells.append((family, f"`{name}`", served[name].served, *widths_and_preset(name)))
    return markdown_table(["family", "model_type", "packed", "head_dim", "preset"], cells).replace("---:", "---")


def widths_and_preset(name: str) -> tuple[str, str]:
    """Channels of a head in the packed layers of models that `fits` knows, or else in transformers' default
    configuration; and the preset to begin with."""
    known = [known["config"] for known in known_models().values() if known["config"]["model_type"] == name]
    configs = [CONFIG_MAPPING[name](**fields).get_text_config(decoder=True) for fields in known or [{}]]
    if (rank := getattr(configs[0], "kv_lora_rank", None)) is not None:
        return f"a latent of {rank} + {configs[0].qk_rope_head_dim}", "`snapmla`"
    widths = set[tuple[int | None, int | None]]()
    for config in configs:
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        packed = [layer for layer, kind in zip(config.per_layer_config, kinds, strict=True) if kind in PACKED_KINDS]
        widths |= {DIRECT.sizes(layer)[1:] for layer in packed}
    shown = ", ".join(str(keys) if keys == values else f"{keys} / {values}" for keys, values in sorted(widths))
    return shown, f"`{DEFAULT_PRESET}`"


def _kinds(fused: str) -> str:
    """Kinds of fused pieces without their numbers, which are those of the small model: `gate, norms, rotary`."""
    return ", ".join(sorted(piece.split()[0] for piece in fused.split(", ")))


def all_sliding(served: Iterable[str]) -> str:
    """Of these architectures, those whose layers are all sliding if their configuration sets `sliding_window`."""
    names = list[str]()
    for name in set(served) & set(CONFIG_MAPPING):
        config = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        if hasattr(config, "sliding_window") and getattr(config, "layer_types", None) is None:
            layers = native_layers(type(config)(sliding_window=64), None)
            names += [f"`{name}`"] * all(isinstance(layer, SLIDING) for layer in layers)
    return ", ".join(sorted(names))


def reason(why: str) -> str:
    """The page's words for an error message, or the message if no pattern matches."""
    for pattern, words in REASONS:
        if match := re.search(pattern, why):
            return match.expand(words)
    return why


def _grouped(columns: Sequence[str], rows: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """A table with one row for each different result, largest groups first. rows: names of architectures, and results."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, result in rows:
        groups.setdefault(result, []).append(name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    cells = [(*result, ", ".join(f"`{name}`" for name in group)) for result, group in ordered]
    return markdown_table([*columns, "model_type"], cells).replace("---:", "---") if cells else "None."


def main(
    only: Annotated[list[str] | None, typer.Option(help="Model type; repeatable. Prints, and writes nothing.")] = None,
    out: Annotated[Path, typer.Option(help="Page to write.")] = PAGE,
) -> None:
    """Try every architecture, and write the page."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for name in only or names():
        begin = time.perf_counter()
        row = examine(name)
        rows.append(row)
        result = f"{row.served}; all ways to generate: {row.generates}" if row.served else row.why
        print(f"{name}: {result} ({time.perf_counter() - begin:.1f} s)", flush=True)
    if not only:
        out.write_text(render(rows, [examine_with_image(name) for name in VISION_ARCHITECTURES]), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
