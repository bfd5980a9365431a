"""Digests: tests whether contents are equal, also across processes. Saved files contain them.

- A **digest** identifies the numbers of one tensor (`digest`), or sampled numbers of many (`Samples`).
- A **fingerprint** of a model has its configuration, adapters, and a digest of every parameter and buffer. The embedding is
  not enough, because a fine-tune may leave it unchanged.

`process_stamps` detects changes within one process, without reading contents.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .process_stamps import computed_once

#: how many numbers are sampled from each parameter, evenly spread
SAMPLED = 256
#: keys of a configuration that do not affect the contents of a cache
_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "_attn_implementation",
    "_attn_implementation_internal",
    "use_cache",
}
_VOLATILE |= {"torch_dtype", "dtype", "output_attentions", "output_hidden_states", "return_dict", "architectures"}
#: attributes of modules that hold adapters (PEFT)
_ADAPTERS = ("active_adapters", "merged_adapters", "disable_adapters", "scaling")


def digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that identify the tensor's numbers, shape and dtype."""

    def compute() -> bytes:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        described = repr((tensor.dtype, tuple(tensor.shape))).encode()
        return hashlib.blake2b(content, digest_size=16, key=hashlib.blake2b(described).digest()).digest()

    return computed_once(tensor, "digest", compute)


@torch.no_grad()
def fingerprint_of(model: torch.nn.Module, use: str) -> dict[str, Any]:
    """The fingerprint of a transformers model: its configuration, dtype, active adapters, and a digest of sampled
    numbers of each parameter and persistent buffer. Waits for the device.

    Args:
        use: what needs the fingerprint, for the error message.

    Raises:
        ValueError: a parameter's numbers are not in memory (offloaded).
    """
    from transformers import __version__

    config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
    modules = list(model.named_modules(remove_duplicate=False))
    return {
        "transformers": __version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": _stripped(config),
        "adapters": adapters_in(_once(modules)),
        "parameters": Samples(dict(_named_tensors(modules)), use).digests(),
    }


class EmbeddedRows:
    """Checksums of rows of an input embedding as it was at one time, as far as texts had their tokens. Samples of the whole
    matrix would miss a single row that was trained. Copies and pickles are `None`.

    Args:
        weight: the embedding.
    """

    @torch.inference_mode(False)  # texts may be added in and outside of it
    def __init__(self, weight: torch.Tensor):
        everything = weight.device.type != "cpu"  # there it takes a millisecond, and selecting rows would wait
        self._weight = weakref.ref(weight)
        self._sums = _row_sums(weight) if everything else torch.zeros(len(weight), dtype=torch.int64)
        self._known = torch.full((len(weight),), everything)

    @staticmethod
    def of(model: Any) -> EmbeddedRows | None:
        """Those of the model now; another object once the embedding has changed. `None`: its rows are no plain numbers in
        memory."""
        weight: Any = getattr(model.get_input_embeddings(), "weight", None)
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.device.type == "meta":
            return None
        if weight.shape[1] * weight.itemsize % 4 or not weight.is_contiguous():
            return None
        rows: EmbeddedRows = computed_once(weight, "rows", lambda: EmbeddedRows(weight))
        return rows

    @torch.no_grad()
    @torch.inference_mode(False)
    def add(self, ids: torch.Tensor) -> None:
        """Note the rows of a text, before the embedding changes."""
        if (weight := self._weight()) is not None and not bool(self._known.all()):
            distinct = self._distinct(ids)
            missing = distinct[~self._known[distinct]]
            self._sums[missing], self._known[missing] = _row_sums(weight[missing]), True

    def digest(self, ids: torch.Tensor) -> str:
        """32 hexadecimal digits that identify the rows of a text that was added. Waits for the device."""
        sums = self._sums[self._distinct(ids).to(self._sums.device)]
        return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def _distinct(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids outside of the vocabulary stand for no token."""
        distinct = ids.unique().cpu().long()
        return distinct[(distinct >= 0) & (distinct < len(self._known))]

    def __reduce__(self):
        return type(None), ()


@torch.no_grad()
def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`. A change of one number changes its product with an odd factor."""
    factors = torch.randint(1 << 30, (rows.shape[1],), generator=torch.Generator().manual_seed(0)) | 1
    integers = rows.detach().view(torch.int32)
    factors = factors[: integers.shape[1]].to(rows.device, torch.int32)
    parts = [(part * factors).sum(-1) for part in integers.split(1024)]
    return torch.cat(parts) if parts else integers.new_zeros(0, dtype=torch.int64)


def rows_digest(model: Any, ids: torch.Tensor | None) -> str | None:
    """`EmbeddedRows.digest` of a text with the model as it is now. `None`: the text is not known as ids, or the rows are not
    known."""
    if ids is None or ids.is_floating_point() or (rows := EmbeddedRows.of(model)) is None:
        return None
    rows.add(ids)
    return rows.digest(ids)


def fingerprint_digest(fingerprint: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that identify a fingerprint."""
    return hashlib.blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=16).hexdigest()


def difference(saved: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The first difference between two fingerprints, in words, or `None`."""
    if saved["dtype"] != model["dtype"]:
        return f"dtype {saved['dtype']}, and the model has {model['dtype']}"
    same_release = saved["transformers"] == model["transformers"]
    if (reason := _config_difference(saved["config"], model["config"], "", same_release)) is not None:
        return reason
    for kind in ("adapters", "parameters"):
        if (name := first_difference(saved[kind], model[kind])) is not None:
            change = "is not there" if name not in saved[kind] or name not in model[kind] else "has other numbers"
            if kind == "adapters":
                change = f"was {saved[kind].get(name)}, and is {model[kind].get(name)} in the model"
            return f"{kind}: {name} {change}" + (
                f" {'in the model' if name in saved[kind] else 'in the file'}" if change == "is not there" else ""
            )
    return None


def first_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key whose values differ, or `None`."""
    return next((name for name in [*saved, *now] if saved.get(name) != now.get(name)), None)


def _config_difference(saved: Any, now: Any, where: str, same_release: bool) -> str | None:
    """Compare two configurations. Releases of transformers write different defaults, so a key that only one of the two
    has counts only within one release."""
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [*saved, *(name for name in now if name not in saved)]
        for name in names:
            if not same_release and (name not in saved or name not in now):
                continue
            inner = f"{where}.{name}" if where else name
            if (change := _config_difference(saved.get(name), now.get(name), inner, same_release)) is not None:
                return change
        return None
    return None if saved == now else f"configuration: {where} was {saved!r}, and is {now!r} in the model"


def _stripped(config: Any) -> Any:
    if isinstance(config, dict):
        return {name: _stripped(value) for name, value in config.items() if name not in _VOLATILE}
    return config


def _once(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module under its first name."""
    seen = set()
    for name, module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def adapters_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, str]:
    """For each module with adapters: which are active, merged or switched off, and the scales of these."""
    adapters = {}
    for name, module in modules:
        if not isinstance(getattr(type(module), "active_adapters", None), property):
            continue  # a transformers model has a method of this name
        settings = {key: getattr(module, key, None) for key in _ADAPTERS}
        if isinstance(settings["scaling"], dict):
            used = {*(settings["active_adapters"] or ()), *(settings["merged_adapters"] or ())}
            settings["scaling"] = {key: x for key, x in settings["scaling"].items() if key in used}
        adapters[name] = json.dumps(settings, default=str, sort_keys=True)
    return adapters


def _named_tensors(modules: Sequence[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter
    for prefix, module in _once(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _plain(name: str, tensor: torch.Tensor, use: str | None) -> Iterator[torch.Tensor]:
    """The tensors that a tensor subclass consists of, or the tensor itself; for quantized tensors also the tensors in
    their attributes."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, torch.Tensor):  # a shard also names its mesh
                yield from _plain(name, part, use)
        return
    if tensor.device.type == "meta":
        if use is None:
            return
        raise ValueError(
            f"the numbers of {name} are not in memory (offloaded), and {use} identifies the model by them. Keep all weights "
            f"in memory (device_map=), or do without {use}"
        )
    yield tensor
    state = getattr(tensor, "quant_state", None)  # bitsandbytes
    yield from (x for x in vars(state).values() if isinstance(x, torch.Tensor)) if state is not None else ()


class Samples:
    """`SAMPLED` numbers of each tensor, on its device. Taking them does not wait for the device.

    Args:
        tensors: by name.
        use: what needs the numbers of all tensors, for the error message. `None`: those that are not in memory are left out.

    Raises:
        ValueError: a tensor's numbers are not in memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], use: str | None = None):
        samples: dict[tuple, list[torch.Tensor]] = {}
        # by name, for each part of a tensor: dtype and device, number of samples, dtype and shape of the part
        self._parts: dict[str, list[tuple[tuple, int, torch.dtype, torch.Size]]] = {}
        for name, tensor in tensors.items():
            for part in _plain(name, tensor, use):
                flat = part.detach().reshape(-1)
                step = max(flat.numel() // (SAMPLED + 1), 1) | 1  # odd: not one column of a matrix only
                sample = flat[: SAMPLED * step : step]
                kind = sample.dtype, sample.device
                self._parts.setdefault(name, []).append((kind, sample.numel(), part.dtype, part.shape))
                samples.setdefault(kind, []).append(sample)
        self._numbers = {kind: torch.cat(parts) for kind, parts in samples.items()}

    def equal(self, other: Samples) -> bool:
        """Whether names, shapes, dtypes and numbers are equal. Waits for each device, once for each dtype."""
        return self._parts == other._parts and all(
            torch.equal(numbers.view(torch.uint8), other._numbers[kind].view(torch.uint8))
            for kind, numbers in self._numbers.items()
        )

    def digests(self) -> dict[str, str]:
        """For each name a digest of shape, dtype and numbers. Waits for each device, once for each dtype."""
        content = {
            kind: memoryview(numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            for kind, numbers in self._numbers.items()
        }
        position = dict.fromkeys(content, 0)
        digests = {}
        for name, parts in self._parts.items():
            hashed = hashlib.blake2b(digest_size=8)
            for kind, count, dtype, shape in parts:
                size = count * kind[0].itemsize
                hashed.update(f"{dtype}{tuple(shape)}".encode())
                hashed.update(content[kind][position[kind] : position[kind] + size])
                position[kind] += size
            digests[name] = hashed.hexdigest()
        return digests
