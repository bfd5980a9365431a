"""Finds the pieces of a model that may be fused, by what modules compute and not by the names of models.

A copy of a module with small weights runs on the CPU, and its result is compared with formulas. The model itself
neither runs nor changes.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .fused_pieces import (
    ACTIVATIONS,
    GATED,
    LIGER,
    PAIRS,
    Gate,
    Norm,
    NotFusedError,
    Piece,
    Products,
    Rotary,
    Unfused,
    eps_of,
    why_no_products,
    why_not_replaced,
)

#: children that take the same input; those of a gate are found together with it
_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
)


# ---- what modules compute ----------------------------------------------------------------------------------------------


def reference_copy(module: nn.Module, parameters: dict[str, Any], children: dict[str, Any]) -> Any:
    """A copy of a module with other parameters and children; the module keeps its own."""
    other = copy.copy(module)
    vars(other).update(_parameters=parameters, _modules=children, training=False)
    return other


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _close(out: Any, want: torch.Tensor) -> bool:
    shaped = isinstance(out, torch.Tensor) and out.shape == want.shape
    return shaped and bool(torch.allclose(out.double(), want.double(), rtol=1e-3, atol=1e-4))


def norm_offset(module: Any) -> float | None:
    """The number that this norm adds to its weight, 0 or 1; `None` if it is not an RMS norm."""
    width, eps = len(module.weight), eps_of(module)
    # small and off center: the added number and a subtracted mean show
    x = (_random(2, width) + 1.0) * (float(eps) or 1e-6) ** 0.5
    weight = _random(width) + 0.3
    try:
        out = type(module).forward(reference_copy(module, {"weight": weight}, {}), x)  # not called: hooks are shared
    except Exception:  # it takes something else than a tensor
        return None
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return next((offset for offset in (0.0, 1.0) if _close(out, scaled * (weight + offset))), None)


def rotary_kind(function: Any) -> bool | None:
    """Whether a function that rotates halves of heads takes one cosine for both (`True`) or one for each channel
    (`False`); `None`: it does something else."""
    q, k, angle = _random(2, 3, 2, 16), _random(2, 2, 2, 16), _random(2, 2, 8)
    narrow = angle.cos(), angle.sin()
    cos, sin = wide = tuple(torch.cat([x, x], dim=-1) for x in narrow)
    expected = [x * cos[:, None] + _half_turned(x) * sin[:, None] for x in (q, k)]
    for shared, rotations in ((False, wide), (True, narrow)):
        try:
            outs = function(q, k, *rotations)
        except Exception:  # it takes cosines of the other width
            continue
        if len(outs) == 2 and all(map(_close, outs, expected)):
            return shared
    return None


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def gate_kind(module: nn.Module) -> tuple[str, str | None, str] | None:
    """The activation; the child that computes gate and up at once, if there is one; and the name of the activation's
    child. `None` if it is not a gated layer."""
    children = dict(module.named_children())
    joined = "gate_up_proj" if "gate_up_proj" in children else None
    linears = ("gate_up_proj", "down_proj") if joined else (*GATED, "down_proj")
    rest = children.keys() - set(linears)
    if len(rest) != 1 or not set(linears) <= children.keys() or [*module.parameters(recurse=False)]:
        return None
    (act,) = rest
    if [*children[act].parameters()]:
        return None
    sizes = {"gate_proj": (8, 6), "up_proj": (8, 6), "gate_up_proj": (16, 6), "down_proj": (5, 8)}
    weights = {name: _random(*sizes[name]).double() * (1 + index) for index, name in enumerate(linears)}
    copies = {name: _linear(weight) for name, weight in weights.items()}
    # large numbers too: limits show
    x = _random(3, 1, 6).double() * torch.tensor([0.3, 3.0, 300.0])[:, None, None]
    try:
        out = type(module).forward(reference_copy(module, {}, {**copies, act: children[act]}), x)
    except Exception:  # it needs more than its children
        return None
    gate, up = (
        F.linear(x, weights[joined]).chunk(2, dim=-1) if joined else (F.linear(x, weights[name]) for name in GATED)
    )
    for name, function in ACTIVATIONS.items():
        if _close(out, F.linear(function(gate) * up, weights["down_proj"])):
            return name, joined, act
    return None


def _linear(weight: torch.Tensor) -> nn.Linear:
    # a fixed sequence: random draws would change the user's random state
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


# ---- finding -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def find_pieces(model: Any, behaviour: Behaviour | None = None) -> Iterator[Piece | Unfused]:
    """The pieces of a model's decoder, including those that must stay unfused. behaviour: of an earlier search."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    behaviour = Behaviour() if behaviour is None else behaviour
    kept: dict[str, str] = {}  # by the beginning of their names: modules that nothing is replaced in
    for name, module in decoder.named_modules():
        if (above := next((kept[each] for each in _above(name) if each in kept), None)) is None:
            if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
                above = kept[name] = "compiled"
            elif type(module).__name__ == "ModulesToSaveWrapper":
                above = kept[name] = _SAVED
        if above == _SAVED and ".modules_to_save." in name:  # PEFT's copy of the module next to it
            continue
        name = name.replace("._orig_mod", "").replace(".original_module", "")
        for look in (_norm, _rotary, _gate, _products):
            piece = look(name, module, behaviour)
            if isinstance(piece, Piece) and (reason := above or why_not_replaced(module)) is not None:
                yield from (Unfused(kind, where, reason) for kind, where, _ in piece.counted(None, reason))
            elif piece is not None:
                yield piece


_SAVED = "modules_to_save"


def _above(name: str) -> Iterator[str]:
    """The module's name, and the names of the modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(len(parts) + 1))


class Behaviour:
    """The results for modules of a kind, because the layers of a model repeat. Refers to classes, and to no module."""

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}

    def of(self, look: Callable[[Any], Any], thing: Any, *key: Any) -> Any:
        if (known := (look, *key)) not in self._seen:
            self._seen[known] = look(thing)
        return self._seen[known]


def _kind(module: nn.Module) -> tuple:
    """The class of a module, and its plain values: layers of one class may differ in a number, such as a limit."""
    attributes = dict(vars(module))  # as they are now: other threads replace `forward` for a while
    return type(module), *((name, x) for name, x in attributes.items() if type(x) in (bool, int, float, str))


def _norm(name: str, module: nn.Module, behaviour: Behaviour) -> Piece | Unfused | None:
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {"weight"} or parameters["weight"].dim() != 1 or any(module.children()):
        return None
    if not isinstance(eps_of(module), float) or behaviour.of(_arguments, type(module), type(module)) != 2:
        return None
    offset = behaviour.of(norm_offset, module, _kind(module), parameters["weight"].shape)
    return Unfused("norms", name, "no RMS norm") if offset is None else Norm(name, module, offset)


def _arguments(kind: type[nn.Module]) -> int:
    """How many arguments the `forward` of a class has, `self` included."""
    return len(inspect.signature(kind.forward).parameters)


def _rotary(name: str, module: nn.Module, behaviour: Behaviour) -> Piece | Unfused | None:
    functions = behaviour.of(_rotations, type(module), type(module))
    if not functions:
        return None
    forward = inspect.unwrap(type(module).forward)
    if any(forward.__globals__[key].__module__.partition(".")[0] == "liger_kernel" for key in functions):
        return Unfused("rotary", name, LIGER)
    shared = {key: behaviour.of(rotary_kind, forward.__globals__[key], forward.__globals__[key]) for key in functions}
    halves = [key for key in functions if shared[key] is not None]
    if not halves:
        return Unfused("rotary", name, PAIRS)
    rotary = Rotary(name, module, halves[0], shared[halves[0]], len(functions) > 1)
    try:
        list(rotary.substitutions(rotary.unfused))
    except NotFusedError as error:
        return Unfused("rotary", name, str(error))
    return rotary


def _rotations(kind: type[nn.Module]) -> list[str]:
    """The names of functions that the `forward` of a class may call to rotate queries and keys."""
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType):
        return []
    return [key for key in forward.__code__.co_names if _rotates(forward.__globals__.get(key))]


def _rotates(function: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    return tuple(inspect.signature(function).parameters)[:4] == ("q", "k", "cos", "sin")


def _gate(name: str, module: nn.Module, behaviour: Behaviour) -> Piece | Unfused | None:
    children = dict(module.named_children())
    if "down_proj" not in children:
        return None
    if hooked := [child for child, x in children.items() if not [*x.parameters()] and why_not_replaced(x)]:
        return Unfused("gate", f"{name}.{hooked[0]}", str(why_not_replaced(children[hooked[0]])))
    gate = behaviour.of(gate_kind, module, _kind(module), *((child, _kind(x)) for child, x in children.items()))
    return None if gate is None else Gate(name, module, *gate)


def _products(name: str, module: nn.Module, behaviour: Behaviour) -> Piece | Unfused | None:
    children = dict(module.named_children())
    for names in _GROUPS:
        if not set(names) <= children.keys():
            continue
        if (apart := why_no_products([(child, children[child]) for child in names])) is not None:
            return Unfused("products", f"{name}.{apart[0]}", apart[1])
        return Products(name, module, names)
    return None
