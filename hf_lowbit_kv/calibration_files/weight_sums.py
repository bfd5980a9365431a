"""Sums of attention weights, which distinguish a model from its fine-tunes, and from itself with an adapter.

Each tensor of an attention module is divided into `SUMS` groups of rows. The sum of a group is over all its rows and
`COLUMNS` neighbouring columns, with fixed factors, in float32. The last number of a tensor is the size of such sums if
signs are random. Quantized weights are dequantized, and active adapters are included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..storage.linear_weights import columns_of, is_ordinary, tensors_of

#: sums per tensor; columns read per tensor; input of a quantized layer for a column, large so that its bias matters less
SUMS, COLUMNS, UNIT = 8, 8, 1024.0
#: largest relative difference of equal tensors' sums. Of one kind: the order of additions differs. Both quantized: they may
#: be dequantized in 16 bits. Of two kinds, one of them quantized: quantization changes the numbers
ALIKE, DEQUANTIZED, COARSE = 1e-3, 1e-2, 0.4
#: for two plain dtypes: multiple of the largest rounding error
ROUNDINGS = 1.5


SHARDS, OFFLOADED = "each process has a shard of them", "they are offloaded"


class WeightSums(NamedTuple):
    """The sums of a model.

    Attributes:
        sums: by kind of the stored numbers (a dtype, or the class of a quantized layer) and `LAYER.NAME`.
        unread: the reason why some tensors are missing, or `None`.
    """

    sums: dict[str, dict[str, list[float]]]
    unread: str | None


class _Part(NamedTuple):
    kind: str
    name: str
    columns: torch.Tensor
    """`[rows, columns]`"""


@torch.no_grad()
def weight_sums(model: Any, layers: Any) -> WeightSums:
    """The sums of a model's attention modules. Waits once per device.

    Args:
        layers: indices of the packed layers.
    """
    parts, unread = [], dict[str, None]()
    if (getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1) > 1:
        return WeightSums({}, SHARDS)
    for index, module in attention_modules(model, set(map(int, layers))):
        for part in _parts_of(module, f"{index}", model.dtype):
            parts.append(part) if isinstance(part, _Part) else unread.setdefault(part)
    if not parts and not unread:
        unread.setdefault("no attention module has a layer_idx")
    sums: dict[str, dict[str, list[float]]] = {}
    for part, part_sums in zip(parts, _sums_of([part.columns for part in parts]), strict=True):
        sums.setdefault(part.kind, {})[part.name] = [float(f"{x:.5g}") for x in part_sums]
    return WeightSums(sums, ", ".join(unread) or None)


def difference(made_for: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """A text on the first tensor whose sums differ, or `None`. Tensors that only one model has are not compared."""
    ours, theirs = _by_name(made_for), _by_name(model)
    for name, (kind, numbers) in ours.items():
        if name not in theirs:
            continue
        other_kind, others = theirs[name]
        a, b = (torch.tensor(x, dtype=torch.float64) for x in (numbers, others))
        layer, _, tensor = name.partition(".")
        if a.shape != b.shape:
            return f"{tensor} of layer {layer} has another shape"
        distance, size = float((a - b).square().mean().sqrt()), float(torch.maximum(a[-1], b[-1]))
        if not distance <= tolerance(kind, other_kind) * size + 1e-12:
            return f"{tensor} of layer {layer} has other numbers"
    return None


def tolerance(kind: str, other: str) -> float:
    """The allowed relative difference of sums of numbers of these kinds."""
    plain = [rounding for each in (kind, other) if (rounding := _rounding(each)) is not None]
    if kind == other:
        return ALIKE if plain else DEQUANTIZED
    return max(ROUNDINGS * max(plain), ALIKE) if len(plain) == 2 else COARSE


def remark(made_for: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """A remark for `summary()` on weights that were not compared, or `None`. Arguments: descriptions of models."""
    if not made_for.get("weights"):
        return f"weights of attention not compared: the file has no sums ({made_for.get('unread') or 'an older file'})"
    if "weights" not in model:
        return "weights of attention not compared: only the configuration is known"
    ours, theirs = _by_name(made_for["weights"]), _by_name(model["weights"])
    if not (common := ours.keys() & theirs.keys()):
        return f"weights of attention not compared: {model.get('unread') or 'their names differ'}"
    if unread := [reason for each in (made_for, model) if (reason := each.get("unread"))]:
        return f"weights of attention compared in part: {unread[0]}"
    if ours.keys() != theirs.keys():
        return "weights of attention compared in part: some have other names"
    if coarse := sorted({(ours[x][0], theirs[x][0]) for x in common if tolerance(ours[x][0], theirs[x][0]) == COARSE}):
        return f"weights of attention compared coarsely: made for {coarse[0][0]}, the model has {coarse[0][1]}"
    return None


def _by_name(sums: Mapping[str, Mapping[str, list[float]]]) -> dict[str, tuple[str, list[float]]]:
    return {name: (kind, numbers) for kind, kind_sums in sums.items() for name, numbers in kind_sums.items()}


def _rounding(kind: str) -> float | None:
    """The relative rounding error of a dtype's numbers; `None`: not a dtype."""
    dtype = getattr(torch, kind, None)
    return torch.finfo(dtype).eps / 2 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def attention_modules(model: Any, layers: set[int]) -> Iterator[tuple[int, torch.nn.Module]]:
    """The attention module of each of these layers: the innermost module of the text model with this `layer_idx`."""
    config = model.config
    kinds = {config.model_type, config.get_text_config(decoder=True).model_type}
    yielded = set()
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if not isinstance(index, int) or index not in layers or index in yielded:
            continue
        if any("layer_idx" in vars(inner) for inner in module.modules() if inner is not module):
            continue
        model_type = getattr(vars(module).get("config"), "model_type", None)
        if model_type is None or model_type in kinds:
            yielded.add(index)
            yield index, module


def _parts_of(module: Any, prefix: str, dtype: torch.dtype) -> Iterator[_Part | str]:
    """The summed parts of a module's tensors. For a tensor that cannot be read, the reason."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield from _plain_part(f"{prefix}.{name}", tensor)
    for name, child in module._modules.items():
        if child is None:
            continue
        # an adapter (PEFT) that is disabled, or merged into its base weight
        while hasattr(child, "base_layer") and (
            getattr(child, "merged", False) or getattr(child, "disable_adapters", False)
        ):
            child = child.base_layer
        if hasattr(child, "base_layer") or _is_quantized(child):
            yield from _evaluated_parts(f"{prefix}.{name}", child, dtype)
        else:
            yield from _parts_of(child, f"{prefix}.{name}", dtype)


def _is_quantized(layer: torch.nn.Module) -> bool:
    """Whether a layer has a weight that is not stored as floats."""
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    return not layer._modules and not all(x is None or is_ordinary(x) for x in tensors)


def _plain_part(name: str, tensor: torch.Tensor) -> Iterator[_Part | str]:
    if (reason := _out_of_reach(tensor)) is not None:
        yield reason
    elif not is_ordinary(tensor):
        yield f"{type(tensor).__name__} is not read"
    else:
        matrix = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
        yield _Part(str(tensor.dtype).removeprefix("torch."), name, matrix[:, _columns(matrix.shape[1])])


def _out_of_reach(tensor: torch.Tensor) -> str | None:
    """The reason why a tensor is not completely in the memory of this process, or `None`."""
    if tensor.is_meta:
        return OFFLOADED
    return SHARDS if hasattr(tensor, "device_mesh") or not tensor.numel() else None  # DTensor; DeepSpeed


def _columns(width: int) -> slice:
    """The columns to read: whole words of packed weights, away from the edge."""
    first = max(min(width // 3 // COLUMNS * COLUMNS, width - COLUMNS), 0)
    return slice(first, min(first + COLUMNS, width))


def _evaluated_parts(name: str, layer: Any, dtype: torch.dtype) -> Iterator[_Part | str]:
    """The weight and the bias of a layer that is quantized or has adapters, computed from its outputs."""
    base = layer
    while hasattr(base, "base_layer"):
        base = base.base_layer
    width = getattr(base, "in_features", None)
    if reasons := [reason for x in tensors_of(layer) if (reason := _out_of_reach(x)) is not None]:
        yield reasons[0]
    elif not isinstance(width, int):
        yield f"{type(base).__name__} is not read"
    elif any(isinstance(x, torch.nn.Dropout) and x.p and x.training for x in layer.modules()):
        yield "adapters drop out numbers while the model is in training mode"
    else:
        weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
        plain = isinstance(weight, torch.Tensor) and is_ordinary(weight)
        kind = str(weight.dtype).removeprefix("torch.") if plain else type(base).__name__  # type: ignore[union-attr]
        if not plain and type(base) is torch.nn.Linear:  # a quantized tensor in a plain layer
            kind = type(weight).__name__
        columns = _columns(width)
        try:
            columns_read = columns_of(layer, width, dtype, columns.stop - columns.start, columns.start, UNIT).float()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            yield f"{type(base).__name__} cannot be evaluated ({str(error).splitlines()[0][:80]})"
            return
        if isinstance(bias, torch.Tensor):
            columns_read = columns_read - bias.detach().float()[:, None] / UNIT
            yield from _plain_part(f"{name}.bias", bias)
        yield _Part(kind, f"{name}.weight", columns_read)


def _sums_of(matrices: list[torch.Tensor]) -> list[list[float]]:
    """The sums of each matrix `[rows, columns]`. Matrices of one shape, dtype and device are processed together."""
    alike: dict[tuple, list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(number)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    order: dict[torch.device, list[int]] = {}
    for (shape, _, device), numbers in alike.items():
        weighted, groups = (
            torch.stack([matrices[n] for n in numbers]) * _factors(shape[0], shape[1], device),
            min(SUMS, shape[0]),
        )
        size = (weighted.square().sum((-1, -2)) / groups).sqrt()
        rows = torch.nn.functional.pad(weighted.sum(-1), (0, -shape[0] % groups))
        group_sums = rows.view(len(numbers), groups, -1).sum(-1)
        sums.setdefault(device, []).append(torch.cat([group_sums, size[:, None]], 1))
        order.setdefault(device, []).extend(numbers)
    out: list[list[float]] = [[]] * len(matrices)
    for device, parts in sums.items():
        counts = [part.shape[1] for part in parts for _ in range(len(part))]
        flat = torch.cat([part.reshape(-1) for part in parts]).tolist()
        for number, count in zip(order[device], counts, strict=True):
            out[number], flat = flat[:count], flat[count:]
    return out


def _factors(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Fixed numbers in (-1.5, -0.5) and (0.5, 1.5), float32 `[rows, columns]`: rows do not cancel out."""
    index = torch.arange(1, rows * columns + 1, device=device)
    fraction = (index * 2654435769 % 2**32).float() / 2**32  # multiples of the golden ratio
    return torch.where(fraction < 0.5, fraction - 1.5, fraction + 0.5).view(rows, columns)
