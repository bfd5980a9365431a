"""Weights below 16 bits. transformers' integrations of torchao and bitsandbytes quantize them while a model is loaded.

Checkpoints that are already quantized (GPTQ, AWQ, FP8, MXFP4) do not need this module. `from_pretrained` reads the
method from their configuration.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

#: size of the groups of weights that share a scale, for methods with groups. It divides the sizes of the bundled model
GROUP_SIZE = 64
SIXTEEN_BITS = "16-bit"


class WeightQuantization(NamedTuple):
    """A way to store the weights of linear layers. The embedding, the head and norms stay in 16 bits.

    Attributes:
        package: a package that must be installed, or `None`.
        meaning: bits of weights and of activations, and the method.
        configuration: function of the device and the model's dtype that returns `quantization_config=` for
            `from_pretrained`.
    """

    package: str | None
    meaning: str
    configuration: Callable[[torch.device, torch.dtype], Any]


def _int8(device: torch.device, dtype: torch.dtype) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _int4(device: torch.device, dtype: torch.dtype) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.quant_primitives import MappingType
    from transformers import TorchAoConfig

    if device.type == "cuda":  # the packing of PyTorch's kernel; torchao's others need more packages
        return TorchAoConfig(Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format="tile_packed_to_4d"))
    # no 4-bit kernel of PyTorch works on every CPU and dtype. Here the same numbers, with a zero point for each group,
    # are dequantized in each call
    int4: Any = torch.int4  # type: ignore[attr-defined]
    return TorchAoConfig(
        IntxWeightOnlyConfig(int4, PerGroup(GROUP_SIZE), mapping_type=MappingType.ASYMMETRIC, scale_dtype=dtype)
    )


def _fp8(device: torch.device, dtype: torch.dtype) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
    from transformers import TorchAoConfig

    return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))


def _bitsandbytes_4(device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _bitsandbytes_8(device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


#: all quantizations, by the names for `--weights`
WEIGHT_QUANTIZATIONS: Mapping[str, WeightQuantization] = {
    SIXTEEN_BITS: WeightQuantization(None, "W16A16", lambda device, dtype: None),
    "torchao-int8": WeightQuantization("torchao", "W8A16, a scale per output", _int8),
    "torchao-fp8": WeightQuantization("torchao", "W8A8, e4m3 with a scale per output and per token", _fp8),
    "torchao-int4": WeightQuantization("torchao", f"W4A16, a scale and a zero point per {GROUP_SIZE}", _int4),
    "bnb-int8": WeightQuantization("bitsandbytes", "W8A8, LLM.int8(): outliers in 16 bits", _bitsandbytes_8),
    "bnb-nf4": WeightQuantization("bitsandbytes", "W4A16, NF4 with a scale per 64", _bitsandbytes_4),
}


def check_weights(name: str) -> WeightQuantization:
    """The quantization with this name.

    Raises:
        ValueError: the name is not known.
        ImportError: the package of the quantization is missing.
    """
    if (quantization := WEIGHT_QUANTIZATIONS.get(name)) is None:
        raise ValueError(f"weights={name!r} is not offered; allowed: {', '.join(WEIGHT_QUANTIZATIONS)}")
    if quantization.package is not None and importlib.util.find_spec(quantization.package) is None:
        raise ImportError(
            f"weights={name!r} needs the package {quantization.package}: pip install {quantization.package}"
        )
    return quantization


def load_quantized(
    source: str | PreTrainedConfig,
    weights: str,
    device: torch.device,
    dtype: torch.dtype,
    state: Mapping[str, torch.Tensor] | None = None,
    attn_implementation: str = "lowbit_kv",
) -> Any:
    """A causal language model in evaluation mode, with linear layers quantized by the method `weights`.

    Args:
        source: hub name or folder, or a configuration. With a configuration, `state` holds the weights.
        weights: name in `WEIGHT_QUANTIZATIONS`.
        dtype: dtype of activations, and of weights that are not quantized.

    Raises:
        ValueError: `weights` is not known.
        ImportError: the package of the quantization is missing.
    """
    quantization = check_weights(weights).configuration(device, dtype)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if quantization is not None:
        options["quantization_config"] = quantization
    options["device_map"] = {"": device}
    if isinstance(source, PreTrainedConfig):
        model_class: Any = AutoModelForCausalLM._model_mapping[type(source)]
        model = model_class.from_pretrained(None, config=source, state_dict=dict(state or {}), **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    return model.eval()


def stored_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers as they are stored. Shared tensors count once."""
    parts: dict[tuple[int, int], int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in plain_tensors(tensor):
            parts[part.data_ptr(), part.nbytes] = part.nbytes
    return sum(parts.values())


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor. For a quantized weight these are codes, scales and zero points."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_tensors(getattr(tensor, name))]
    state = getattr(tensor, "quant_state", None)  # bitsandbytes, 4 bits
    kept = [getattr(state, name, None) for name in ("absmax", "code", "offset")] if state is not None else []
    nested = getattr(state, "state2", None)
    kept += [getattr(nested, name, None) for name in ("absmax", "code")] if nested is not None else []
    kept.append(getattr(tensor, "SCB", None))  # bitsandbytes, 8 bits
    return [tensor, *(part for part in kept if isinstance(part, torch.Tensor))]
