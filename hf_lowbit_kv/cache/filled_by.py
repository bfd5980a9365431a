"""The model whose keys and values a cache holds, and whether it still computes the same ones.

A cache takes a snapshot of its model when its first tokens come, without waiting for the device. It takes another one when
a prompt continues. Compared are names and scales of active adapters, and sampled weights of all layers: keys and values
depend on everything before them, but not on the output embedding.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..calibration_files.model_description import MadeFor, describe_model
from ..calibration_files.weight_sums import attention_modules
from ..storage.content_digests import Samples, adapters_in, first_difference
from ..storage.process_stamps import Unstamped


class ModelRef:
    """A weak reference to the model that a cache was made for.

    A reference that is copied together with its model refers to the copied model. A pickled one refers to no model.
    """

    def __init__(self, model_or_config: Any = None):
        self._model = weakref.ref(model_or_config) if isinstance(model_or_config, torch.nn.Module) else None

    def get(self, use: str) -> Any:
        """The model. Raises `ValueError` if there is none. use: the action for the message."""
        model = self.alive()
        if model is None:
            raise ValueError(
                f"this cache cannot be {use}: it was made from a configuration or loaded from a pickle, or its model is gone, "
                "so the model of its tokens is unknown. Make the cache from the model"
            )
        return model

    def alive(self) -> Any:
        """The model, or `None` if there is none."""
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        model = self.alive()
        return ModelRef(memo.get(id(model), model))

    def __reduce__(self):
        return ModelRef, ()


class ModelSnapshot(Unstamped):
    """Adapters and sampled weights of a model, or of one of its attention modules, at one time.

    Args:
        modules: layer indices and attention modules.
        model: the model whose adapters and weights outside of `modules` count too; `None`: no others count.
    """

    @torch.no_grad()
    def __init__(self, modules: Iterable[tuple[int, torch.nn.Module]], model: torch.nn.Module | None = None):
        layers = dict(modules)
        named = [(f"{index}.{name}", x) for index, layer in layers.items() for name, x in layer.named_modules()]
        self._modules = {index: weakref.ref(layer) for index, layer in layers.items()}
        self.classes = {index: type(layer).__name__ for index, layer in layers.items()}
        self.adapters = adapters_in(named)
        tensors = _weights(named)
        self.others: dict[str, str] | None = None
        if model is not None:
            inside = {id(module) for _, module in named}
            others = [(name, x) for name, x in model.named_modules() if id(x) not in inside]
            self.others = adapters_in(others)
            tensors |= _weights(others, model)
        self._samples = Samples(tensors)
        self._dtypes = {name: x.dtype for name, x in tensors.items()}

    def knows(self, module: torch.nn.Module) -> bool:
        """Whether it is one of the attention modules."""
        return any(ref() is module for ref in self._modules.values())

    def difference(self, now: ModelSnapshot) -> str | None:
        """The first difference, in words, or `None`. Only what both snapshots have seen is compared. Waits for the device."""
        layers = self.classes.keys() & now.classes.keys()
        for index in sorted(layers):
            if (was := self.classes[index]) != (found := now.classes[index]):
                return f"layer {index} was {was}, and is {found}"
        before, after = (
            {x: y for x, y in snapshot.adapters.items() if _layer(x) in layers} for snapshot in (self, now)
        )
        if self.others is not None and now.others is not None:
            before, after = before | self.others, after | now.others
        if (name := first_difference(before, after)) is not None:
            return f"adapters of {name} were {before.get(name, 'none')}, and are {after.get(name, 'none')}"
        if self._samples.equal(now._samples):
            return None
        digests, current = self._samples.digests(), now._samples.digests()
        name = next((x for x, digest in digests.items() if current.get(x, digest) != digest), None)
        if name is None:
            return None
        layer, _, rest = name.partition(".")
        weight = f"{rest} of layer {layer}" if layer.isdecimal() else name
        was, found = (str(snapshot._dtypes[name]).removeprefix("torch.") for snapshot in (self, now))
        return f"{weight} has other numbers" if was == found else f"{weight} was {was}, and is {found}"


def _weights(
    modules: Iterable[tuple[str, torch.nn.Module]], model: torch.nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """The parameters of these modules by name, without those of the model's output embedding."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return {
        f"{prefix.rstrip('.')}.{name}".replace(".base_layer", ""): parameter
        for prefix, module in modules
        if module is not output
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _layer(name: str) -> int:
    return int(name.partition(".")[0])


class FilledBy(NamedTuple):
    """The model that filled a cache, as it was then."""

    model: ModelSnapshot | None
    """the model that the cache was made for; `None`: it was made from a configuration, or the model is gone"""
    running: ModelSnapshot | None = None
    """the attention module of the first packed layer, if it is not one of this model's"""

    def running_on(self, module: Any) -> FilledBy:
        """This, with a snapshot of the first packed layer's attention module if that is not one of the model's."""
        if self.model is not None and self.model.knows(module):
            return self
        return FilledBy(self.model, _snapshot_of_module(module))

    def why_not(self, module: Any) -> str | None:
        """How the attention module of the first packed layer differs from the one that filled the cache, in words, or
        `None`. A module of the model that filled it does not: `difference` compares the model."""
        if self.running is None and self.model is not None and self.model.knows(module):
            return None
        now = _snapshot_of_module(module)
        return None if now is None else self.difference(now)

    def difference(self, now: ModelSnapshot) -> str | None:
        """How a model differs from the one that filled the cache, in words, or `None`. Waits for the device."""
        snapshot = self.running or self.model
        return None if snapshot is None else snapshot.difference(now)

    def __reduce__(self):
        return FilledBy, (None,)


class Calibrated(NamedTuple):
    """The model that a cache's calibration was made for, and the cache's model when it was last compared with that one."""

    made_for: MadeFor
    compared: ModelSnapshot | None
    """`None`: the cache was made from a configuration"""

    def check(self, now: ModelSnapshot, model: Any, sizes: Mapping[int, tuple[int | None, ...]]) -> Calibrated:
        """Compare the model with the calibration's, if it has changed. Waits for the device.

        Args:
            now: the model's present state.
            sizes: by packed layer, as for `describe_model`.

        Raises:
            ValueError: the calibration was not made for the model as it is.
        """
        if self.compared is not None and self.compared.difference(now) is None:
            return self
        self.made_for.check(describe_model(model, sizes))
        return Calibrated(self.made_for, now)

    def __reduce__(self):
        return Calibrated, (self.made_for, None)


def snapshot_of(model: Any, layers: Iterable[int]) -> ModelSnapshot:
    """A snapshot of the model. layers: indices of the packed layers."""
    return ModelSnapshot(attention_modules(model, set(layers)), model)


def _snapshot_of_module(module: Any) -> ModelSnapshot | None:
    """A snapshot of one attention module; `None` if the module has no `layer_idx`."""
    index = getattr(module, "layer_idx", None)
    return ModelSnapshot([(index, module)]) if isinstance(module, torch.nn.Module) and isinstance(index, int) else None


def another_model(reason: str) -> str:
    """The message for a cache that another model or adapter would continue."""
    return (
        f"this cache was filled by a different model: {reason}. Go back to the model and the adapters that filled it, or call "
        "cache.reset() and pass the whole text again"
    )
