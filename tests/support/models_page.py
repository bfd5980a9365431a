"""Fills `docs/models.md`, the supported models: `python tests/support/models_page.py` (about an hour on a CPU).

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
    ("^keys and values of a low-bit cache", "the model computes with keys and values after it has stored them"),
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


def render(rows: list[ModelRow], with_images: Sequence[ModelRow], page: str) -> str:
    """The page with these results in the place of others. Architectures with the same results stand in one row of a table."""
    served = [row for row in rows if row.served]
    untried = [row for row in rows if row.why.startswith("not tried")]
    refused = [row for row in rows if not row.served and row not in untried]
    exceptions = "".join(f", except `{row.name}` ({row.generates})" for row in served if row.generates != "yes")
    images = [(row.served or f"no: {row.why}", row.generates) for row in with_images]
    tables = [
        _families({row.name: row for row in served}),
        _grouped(
            ("packed", "fused", "calibrated"),
            ((row.name, (row.served, _kinds(row.fused), row.calibrated)) for row in served),
        ),
        _grouped(("packed", "all ways to generate"), zip((row.name for row in with_images), images, strict=True)),
        _grouped(("why",), ((row.name, (reason(row.why),)) for row in refused)),
    ]
    release = f"{len(served)} of the {len(rows)} decoder architectures of transformers {transformers.__version__} are"
    found = {
        r"^\d+ of the \d+ decoder architectures of transformers [\d.]+ are": release,
        r"(?<=^Some configurations of ).*?(?= set `sliding_window`)": all_sliding(row.name for row in served),
        r"(?<= work with all models of the table).*?(?=\. )": exceptions,
        r"(?<=own cache cannot run it:\n).*(?=\.$)": ", ".join(f"`{row.name}`" for row in untried) or "none",
    }
    for table in tables:  # in the place of the one with the same columns
        head = re.escape(table.splitlines()[0])
        found[rf"^{head}\n(?:\|.*\n)+"] = table
    for pattern, text in found.items():
        page, count = re.subn(pattern, lambda _, text=text: text, page, flags=re.MULTILINE)
        assert count == 1, pattern
    return page


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
    return markdown_table([*columns, "model_type"], cells).replace("---:", "---")


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
        images = [examine_with_image(name) for name in VISION_ARCHITECTURES]
        out.write_text(render(rows, images, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
