"""The numbers that a linear layer multiplies with, whatever stores them: plain floats, quantized weights, adapters.

A plain weight is read. For any other layer the weight's columns are the outputs for unit vectors.
"""

from __future__ import annotations

from typing import Any

import torch


def is_ordinary(weight: torch.Tensor) -> bool:
    """Whether it is a plain tensor of floats of 16 bits or more."""
    return type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.is_floating_point() and weight.itemsize >= 2


def has_hooks(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def is_plain(layer: Any, columns: int) -> bool:
    """Whether `layer` multiplies with its weight `[out, columns]` and does nothing else."""
    if type(layer).forward is not torch.nn.Linear.forward or has_hooks(layer):
        return False
    return is_ordinary(layer.weight) and layer.weight.dim() == 2 and layer.weight.shape[1] == columns


def is_quantized(layer: Any) -> bool:
    """Whether the layer itself (not a layer inside it, as an adapter has) holds weights that are no ordinary floats."""
    inner = any(True for _ in layer.children())
    return not inner and not has_hooks(layer) and not all(is_ordinary(x) for x in tensors_of(layer))


def tensors_of(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]


@torch.inference_mode(False)
@torch.no_grad()
def columns_of(
    layer: Any, width: int, dtype: torch.dtype, count: int | None = None, first: int = 0, unit: float = 1.0
) -> torch.Tensor:
    """Columns of the weight of a quantized or adapted layer, `[out, count]`.

    Args:
        width: columns of the whole weight.
        count: how many are wanted; `None`: all.
        first: where they begin.
        unit: the input for a column. A layer with a bias adds `1 / unit` of it to each column.
    """
    count = width if count is None else count
    scale, weight = getattr(layer, "weight_scale_inv", None), getattr(layer, "weight", None)
    if scale is not None and weight is not None and scale.dim() == 2 and weight.dim() == 2:
        # FP8 with a scale for each block (DeepSeek-V3's own checkpoints): the layer would quantize the unit vectors too
        return _of_blocks(layer, weight, scale)[:, first : first + count].to(dtype)
    device = next((x.device for x in tensors_of(layer)), torch.device("cpu"))
    units = torch.zeros(count, width, dtype=dtype, device=device)
    units.diagonal(first).fill_(unit)
    columns = layer(units).to(dtype).T.contiguous()
    return columns if unit == 1 else columns / unit


def _of_blocks(layer: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight that has a scale for each block, in float32."""
    rows, columns = (-(-w // s) for w, s in zip(weight.shape, scale.shape, strict=True))
    block = getattr(layer, "block_size", None) or (rows, columns)
    full = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * full[: weight.shape[0], : weight.shape[1]]
