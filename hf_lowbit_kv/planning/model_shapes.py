"""The shape of a model without its weights: from a bundled configuration, a folder, the hub, or a configuration object.

`bundled/known_models.json` has the sizes of well-known models, so that their names work offline.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..cache.served_models import auto_class
from ..folders import check_model_folder
from .weight_kinds import WEIGHT_KINDS

BUNDLED = Path(__file__).resolve().parent.parent / "bundled" / "known_models.json"


#: `quantization_config` of a configuration, as (method, bits) -> name in `WEIGHT_KINDS`
QUANTIZED = {
    ("gptq", 4): "int4",
    ("awq", 4): "int4",
    ("gptq", 8): "int8",
    ("fp8", None): "fp8",
    ("mxfp4", None): "mxfp4",
    ("bitsandbytes", 4): "fp4",
    ("bitsandbytes", 8): "int8",
    ("compressed-tensors", "int4"): "int4",
    ("compressed-tensors", "int8"): "int8",
    ("compressed-tensors", "float4"): "fp4",
    ("compressed-tensors", "float8"): "fp8",
}


class Shape(NamedTuple):
    """A model on the meta device: it has layers and sizes, and no memory."""

    name: str
    model: PreTrainedModel
    weights: str
    """the kind of the published weights, one of `WEIGHT_KINDS`"""
    config: PreTrainedConfig
    """of the decoder"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of attention, and of a 16-bit cache."""
        return self.model.dtype


@cache
def known_models() -> dict[str, Any]:
    """The bundled configurations by hub name: `config` (fields), `weights`, `published_billions`, `source`."""
    return json.loads(BUNDLED.read_text(encoding="utf-8"))


def shape_of(model: str | Path | PreTrainedConfig | PreTrainedModel) -> Shape:
    """The shape of a model.

    Args:
        model: a hub name or a folder (the bundled names need no hub), a configuration, or a model.

    Raises:
        ValueError: the quantization is unknown, or the configuration is not that of a causal language model.
        OSError: the hub or folder has no such model. The message names a similar known model.
    """
    dtype: torch.dtype | None = None
    build: Any = None
    if isinstance(model, PreTrainedModel):
        dtype, build, model = model.dtype, type(model)._from_config, model.config
    if isinstance(model, PreTrainedConfig):
        name, config, weights = getattr(model, "_name_or_path", "") or model.model_type, model, None
    elif (entry := known_models().get(str(model))) is not None:
        name, config, weights = str(model), AutoConfig.for_model(**entry["config"]), entry["weights"]
    else:
        name, config, weights = str(model), _read_config(str(model)), None
    if config.is_encoder_decoder:
        raise ValueError(f"model={name!r} is an encoder-decoder model; only decoders are supported")
    auto = auto_class(config)
    if build is None and type(config) not in auto._model_mapping:
        raise ValueError(
            f"model={name!r} is no causal language model of transformers (model_type={config.model_type!r})"
        )
    decoder = config.get_text_config(decoder=True)
    weights = weights or _published_as(name, config, dtype or getattr(decoder, "dtype", None))
    dtype = getattr(torch, weights) if WEIGHT_KINDS[weights].everything else dtype or torch.bfloat16
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that do not run here
        built = (build or auto.from_config)(config, dtype=dtype)
        return Shape(name, built, weights, decoder)


def _read_config(name: str) -> PreTrainedConfig:
    """The configuration in a folder or on the hub."""
    check_model_folder("model", name)
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        names = {entry.rpartition("/")[2].lower(): entry for entry in known_models()}
        names |= {entry.lower(): entry for entry in known_models()}
        if not Path(name).exists() and (close := difflib.get_close_matches(name.lower(), names, n=1)):
            raise type(error)(f"{error}\nmodel={name!r}: did you mean {names[close[0]]!r}?") from error
        raise


def _published_as(name: str, config: PreTrainedConfig, dtype: torch.dtype | None) -> str:
    """The kind of weights according to the configuration; for an unquantized model, its dtype."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
        method, bits = str(fields.get("quant_method", "")).split(".")[-1].lower(), fields.get("bits")
        if method == "bitsandbytes":
            bits = 4 if fields.get("load_in_4bit") else 8
        for group in (fields.get("config_groups") or {}).values():  # of compressed-tensors
            bits = "{type}{num_bits}".format_map(group["weights"])
        if (kind := QUANTIZED.get((method, bits)) or QUANTIZED.get((method, None))) is None:
            raise ValueError(
                f"model={name!r} is published with quant_method={method!r}, whose size is unknown; pass weights=, one of "
                f"{', '.join(WEIGHT_KINDS)}, or a size such as '5.7GB'"
            )
        return kind
    stored = str(dtype or getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return stored if stored in WEIGHT_KINDS else "bfloat16"


def weight_bytes(shape: Shape, kind: str) -> int:
    """Bytes of all parameters stored as `kind`, a name in `WEIGHT_KINDS`."""
    weights = WEIGHT_KINDS[kind]
    bits = 0.0
    for parameter, quantizable, expert in _parameters(shape.model):
        if parameter.dtype != shape.dtype:  # some routers are float32, whatever the model is
            bits += 8 * parameter.nbytes
        elif weights.everything or (quantizable and (expert or not weights.only_experts)):
            bits += parameter.numel() * weights.bits + parameter.numel() / parameter.shape[-1] * weights.per_output
        else:
            bits += 16 * parameter.numel()
    return round(bits / 8)


def _parameters(model: PreTrainedModel) -> Iterator[tuple[torch.Tensor, bool, bool]]:
    """Yields each parameter once, whether it is quantized with the linear layers, and whether it belongs to experts."""
    head = model.get_output_embeddings()
    linear = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head
    }
    for name, parameter in model.named_parameters():
        expert = ".experts." in name and parameter.dim() >= 2 and "bias" not in name
        yield parameter, id(parameter) in linear or expert, expert
