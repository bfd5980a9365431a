"""Pieces: parts of a model that one fused kernel can compute instead of several (norms, rotary embeddings, gates, products).

A piece computes its result in three ways: by its module (`unfused`), by a kernel (`fused`), and in float64
(`compared`). `piece_finder` finds the pieces of a model, and `fusing` uses them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..cache.served_models import tp_size
from ..triton_kernels.toolchain import why_gpu_cannot_launch
from .tensor_parallel import local, splits

#: kinds of pieces, in the order of `summary()`
KINDS = ("norms", "rotary", "gate", "products")
#: activations by their names in kernels
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
#: classes of weights that kernels read by address
_PLAIN = (nn.Parameter, torch.Tensor)
#: numbers of a weight that are converted to float64 at a time
_WIDENED = 2**23

Substitution = tuple[nn.Module, Callable[..., Any]]
Comparison = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NotFusedError(Exception):
    """A piece cannot be fused; the message is the reason."""


class Unfused(NamedTuple):
    """A piece that is not fused."""

    kind: str
    name: str
    reason: str


class Piece:
    """One piece of a model.

    Args:
        name: the name of its module in the decoder.
        module: the module that computes it.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module: Any = module

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of its kernel, the fastest first."""
        return (self.kind,)

    @property
    def unused(self) -> str:
        """The reason to show if no step used the piece."""
        return "not called in a step"

    @property
    def mismatch(self) -> str | None:
        """The reason, found during a step, why the piece must stay unfused even if its kernel is accurate; or `None`."""
        return None

    def counted(self, variant: str | None, reason: str) -> Iterator[tuple[str, str, str | None]]:
        """The entries of `summary()` if this variant (`None`: none) is used: kind, name, and the reason if it is unfused."""
        yield self.kind, self.name, reason if variant is None else None

    def substitutions(self, call: Callable[..., Any]) -> Iterator[Substitution]:
        """Modules, and the replacements of their `forward` with which `call` computes the piece."""
        original = own_forward(self.module)
        yield (
            self.module,
            lambda *args, **kwargs: call(*args) if len(args) == 1 and not kwargs else original(*args, **kwargs),
        )

    def example(self, rows: int) -> tuple[torch.Tensor, ...] | None:
        """Arguments for a step of this many rows, to compile the kernel; `None`: they are not known."""
        return None

    def unfused(self, *args: Any) -> Any:
        return own_forward(self.module)(*args)

    def fused(self, variant: str, *args: Any, **kwargs: Any) -> Any:
        """The result by a kernel. Raises `NotFusedError` for arguments that it does not take."""
        raise NotImplementedError

    def kernels(self, variant: str, *args: Any, **kwargs: Any) -> Any:
        """Run only the kernels of `fused`, no module of the model. Threads that compile ahead call this, and under tensor
        parallelism a module would wait for the other processes."""
        return self.fused(variant, *args, **kwargs)

    def compared(self, variant: str, out: Any, *args: Any) -> Iterator[Comparison]:
        """The results to compare before the kernel is used: the kernel's, the module's, and the exact one in float64.

        Args:
            out: the result of `unfused` for these arguments.
        """
        raise NotImplementedError


class Norm(Piece):
    """An RMS norm, with its weight or with one plus its weight."""

    kind = "norms"

    def __init__(self, name: str, module: nn.Module, offset: float):
        super().__init__(name, module)
        self.offset, self.eps = offset, eps_of(module)

    @property
    def variants(self) -> tuple[str, ...]:
        """PyTorch's own function takes 4.4 us where the kernel takes 1.6 (one H200), and needs no Triton."""
        if self.offset:
            return ("kernel",)
        return ("torch",) if why_no_kernels(self.module.weight.device.type) else ("kernel", "torch")

    def example(self, rows: int) -> tuple[torch.Tensor, ...]:
        weight = local(self.module.weight)
        return (weight.new_zeros(rows, 1, len(weight)),)

    def fused(self, variant: str, x: torch.Tensor) -> torch.Tensor:
        weight: Any = local(self.module.weight)
        if variant == "torch":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        check_kernels(x.device)
        from ..triton_kernels.fused_kernels import rms_norm

        return rms_norm(x, weight, self.eps, self.offset)

    def compared(self, variant: str, out: torch.Tensor, x: torch.Tensor) -> Iterator[Comparison]:
        wide, weight = x.double(), local(self.module.weight).double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (weight + self.offset)
        yield self.fused(variant, x), out, exact


class Rotary(Piece):
    """Rotary embeddings of an attention module, which calls a function of its Python module for them."""

    kind = "rotary"

    def __init__(self, name: str, module: nn.Module, function: str, shared: bool, others: bool):
        super().__init__(name, module)
        self.function, self.shared, self.others = function, shared, others
        self.rotate = inspect.unwrap(type(module).forward).__globals__[function]

    @property
    def unused(self) -> str:
        return PAIRS if self.others else super().unused

    def substitutions(self, call: Callable[..., Any]) -> Iterator[Substitution]:
        def rotate(*args: Any, **kwargs: Any) -> Any:
            return call(*args) if len(args) == 4 and not kwargs else self.rotate(*args, **kwargs)

        forward = with_globals(type(self.module).forward, {self.function: rotate})
        yield self.module, types.MethodType(forward, self.module)

    def example(self, rows: int) -> tuple[torch.Tensor, ...] | None:
        """As most models call it: cosines of the whole head, or of the part that the configuration names."""
        config: Any = getattr(self.module, "config", None)
        head_dim: Any = getattr(self.module, "head_dim", None)
        weight = local(next(self.module.parameters(), None))
        counts: list[Any] = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
        if weight is None or not all(isinstance(n, int) for n in (head_dim, *counts)):
            return None
        part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
        ranks = tp_size(config)
        q, k = (weight.new_zeros(rows, 1, int(n) // ranks, head_dim).transpose(1, 2) for n in counts)
        cos = weight.new_zeros(rows, 1, int(head_dim * part) // (2 if self.shared else 1))
        return q, k, cos, cos

    def unfused(self, *args: torch.Tensor) -> Any:
        return self.rotate(*args)

    def fused(self, variant: str, *args: torch.Tensor) -> Any:
        q, k, cos, _ = args
        turned = cos.shape[-1] * (2 if self.shared else 1)
        if (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or turned > q.shape[-1] or cos.shape[1] != q.shape[2]:
            raise NotFusedError("cosines of an unusual shape")
        check_kernels(q.device)
        from ..triton_kernels.fused_kernels import rotary

        return rotary(*args, shared=self.shared)

    def compared(self, variant: str, out: Any, *args: torch.Tensor) -> Iterator[Comparison]:
        exact = self.rotate(*(x.double() for x in args))
        yield from zip(self.fused(variant, *args), out, exact, strict=True)


class Gate(Piece):
    """The feed-forward layer `down(activation(gate(x)) * up(x))`; gate and up may be halves of one product.

    Variants: `products`, both products and the activation in one launch; `gate`, only the activation.
    """

    kind = "gate"

    def __init__(self, name: str, module: nn.Module, activation: str, joined: str | None, act: str):
        super().__init__(name, module)
        self.activation, self.joined, self.act = activation, joined, act
        self.apart = None if joined else why_no_products([(child, module.get_submodule(child)) for child in GATED])
        """what keeps the products apart"""

    @property
    def variants(self) -> tuple[str, ...]:
        return ("gate",) if self.joined or self.apart else ("products", "gate")

    def counted(self, variant: str | None, reason: str) -> Iterator[tuple[str, str, str | None]]:
        yield "gate", self.name, reason if variant is None else None
        if self.apart is not None:
            child, why = self.apart
            yield "products", f"{self.name}.{child}", why
        elif self.joined is None:
            yield "products", self.name, None if variant == "products" else reason

    def fused(self, variant: str, x: torch.Tensor) -> torch.Tensor:
        return self.module.down_proj(self.kernels(variant, x))

    def example(self, rows: int) -> tuple[torch.Tensor, ...] | None:
        if len(self.variants) == 1:
            return None
        return (local(self.module.gate_proj.weight).new_zeros(rows, 1, self.module.gate_proj.in_features),)

    def kernels(self, variant: str, x: torch.Tensor) -> torch.Tensor:
        check_kernels(x.device)
        if variant == "gate":
            from ..triton_kernels.fused_kernels import gated

            return gated(*self._products(x), self.activation)
        from ..triton_kernels.fused_products import gated_product

        gate, up = [self.module.get_submodule(name) for name in GATED]
        return gated_product(_checked(x, gate), tuple(_weights([gate, up])), self.activation, _biases([gate, up]))

    def _products(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = self.module
        if self.joined is not None:
            return getattr(module, self.joined)(x).chunk(2, dim=-1)
        return module.gate_proj(x), module.up_proj(x)

    def compared(self, variant: str, out: torch.Tensor, x: torch.Tensor) -> Iterator[Comparison]:
        gate, up = self._products(x)
        unfused = getattr(self.module, self.act)(gate) * up
        if variant == "gate":
            wide = gate.double(), up.double()
        else:
            wide = tuple(_wide_product(x, self.module.get_submodule(name)) for name in GATED)  # type: ignore[assignment]
        yield self.kernels(variant, x), unfused, ACTIVATIONS[self.activation](wide[0]) * wide[1]


#: children of a gate whose products are separate
GATED = ("gate_proj", "up_proj")


class Products(Piece):
    """Linear layers of one module that take the same input, one after the other."""

    kind = "products"

    def __init__(self, name: str, module: nn.Module, names: tuple[str, ...]):
        super().__init__(name, module)
        self.linears: list[Any] = [module.get_submodule(child) for child in names]
        self.shared: SharedInput | None = None

    @property
    def mismatch(self) -> str | None:
        return None if self.shared is None else self.shared.mismatch

    def substitutions(self, call: Callable[..., Any]) -> Iterator[Substitution]:
        self.shared = SharedInput(call)
        for index, linear in enumerate(self.linears):
            yield linear, functools.partial(self.shared.output, index, own_forward(linear))

    def example(self, rows: int) -> tuple[torch.Tensor, ...]:
        return (local(self.linears[0].weight).new_zeros(rows, 1, self.linears[0].in_features),)

    def unfused(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(own_forward(linear)(x) for linear in self.linears)

    def fused(self, variant: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        check_kernels(x.device)
        from ..triton_kernels.fused_products import products

        return products(_checked(x, self.linears[0]), _weights(self.linears), _biases(self.linears))

    def compared(self, variant: str, out: tuple[torch.Tensor, ...], x: torch.Tensor) -> Iterator[Comparison]:
        exact = [_wide_product(x, linear) for linear in self.linears]
        yield from zip(self.fused(variant, x), out, exact, strict=True)


class SharedInput:
    """Computes all products of an input when the first one is requested, and returns the others for the same, unchanged
    input."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call
        self._x: Any = None
        self._version = -1
        self._outputs: dict[int, torch.Tensor] = {}
        self._differed = self._uncounted = False

    @property
    def mismatch(self) -> str | None:
        """Whether products were computed that nothing used, or that could not be shared."""
        if self._uncounted:
            return "inference mode"
        return "its inputs differ" if self._differed or self._outputs else None

    def output(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 1 or kwargs:
            return original(*args, **kwargs)
        if args[0].is_inference():  # inference tensors have no version counter
            self._uncounted = True
            return original(*args)
        (x,) = args
        if self._x is not x or self._version != x._version or index not in self._outputs:
            self._differed |= bool(self._outputs)
            self._x, self._version = x, x._version
            self._outputs = dict(enumerate(self._call(x)))
        out = self._outputs.pop(index)
        if not self._outputs:
            self._x = None
        return out


PAIRS, LIGER = "interleaved RoPE", "already patched by Liger-Kernel"


# ---- reasons to stay unfused -----------------------------------------------------------------------------------------


def why_not_replaced(module: nn.Module) -> str | None:
    """Why this module's own `forward` has to run, or `None`."""
    if type(module).__module__.partition(".")[0] == "liger_kernel":
        return LIGER
    if "forward" in vars(module) and not splits(module):
        return "its forward is replaced already"
    if module._forward_hooks or module._forward_pre_hooks:
        return "hooks"
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "compiled"
    return "train()" if module.training else None


def why_no_products(linears: list[tuple[str, nn.Module]]) -> tuple[str, str] | None:
    """Which of these children cannot share a launch, and why, or `None`."""
    first: Any = linears[0][1]
    for name, linear in linears:
        if type(linear) is not nn.Linear:
            return name, _called(linear)
        if (reason := why_not_replaced(linear)) is not None:
            return name, reason
        weight: Any = local(linear.weight)
        is_plain = isinstance(linear.weight, nn.Parameter) and type(weight) in _PLAIN and weight.layout is torch.strided
        if not is_plain or weight.stride(-1) != 1:
            return name, "its weight is not a plain tensor"
        if weight.dtype not in _SIXTEEN_BITS:
            return name, str(weight.dtype).removeprefix("torch.")
        same = (weight.dtype, weight.device, linear.bias is None)
        if same != (first.weight.dtype, first.weight.device, first.bias is None):
            return name, "another dtype, device or bias than the others"
    return None


def _called(module: nn.Module) -> str:
    """The name, for messages, of a layer that takes the place of a linear one."""
    package, _, rest = type(module).__module__.partition(".")
    if package == "peft":
        tuner = rest.split(".")[1] if rest.startswith("tuners.") else rest
        return {"lora": "LoRA"}.get(tuner, tuner)
    return type(module).__name__


def check_kernels(device: torch.device) -> None:
    """Raise `NotFusedError` if Triton's kernels cannot run."""
    if (reason := why_no_kernels(device.type)) is not None:
        raise NotFusedError(reason)


def why_no_kernels(device_type: str) -> str | None:
    """Why Triton's kernels cannot run on such devices, or `None`."""
    if device_type == "cuda":
        return why_gpu_cannot_launch()
    try:
        from triton import knobs
    except ImportError:
        return "Triton is not installed"
    return None if device_type == "cpu" and knobs.runtime.interpret else f"no kernels for {device_type}"


def _checked(x: torch.Tensor, linear: Any) -> torch.Tensor:
    """An input that kernels of products take."""
    from ..triton_kernels.fused_products import MAX_ROWS

    if (rows := x.numel() // x.shape[-1]) > MAX_ROWS:
        raise NotFusedError(f"{rows} rows; up to {MAX_ROWS} are fused")
    if x.dtype != linear.weight.dtype:
        raise NotFusedError(f"an input in {str(x.dtype).removeprefix('torch.')}")
    return x


def _wide_product(x: torch.Tensor, linear: Any) -> torch.Tensor:
    """`linear(x)` in float64, a part of the outputs at a time."""
    wide, (weight,), biases = x.double(), _weights([linear]), _biases([linear])
    size = max(_WIDENED // weight.shape[1], 1)
    out = torch.cat([F.linear(wide, part.double()) for part in weight.split(size)], dim=-1)
    return out if biases is None else out + biases[0].double()


def _weights(linears: list[Any]) -> list[torch.Tensor]:
    return [local(linear.weight) for linear in linears]


def _biases(linears: list[Any]) -> list[torch.Tensor] | None:
    return None if linears[0].bias is None else [local(linear.bias) for linear in linears]


# ---- functions of a module ---------------------------------------------------------------------------------------------


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's `forward` without our replacement: that of its class, or the wrapper of tensor parallelism."""
    if splits(module):
        forward = vars(module)["forward"]
        return getattr(forward, "original", forward)
    return type(module).forward.__get__(module)


def with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """A function, decorators included, that sees other globals. Neither the function nor its module changes.

    Raises:
        NotFusedError: a decorator keeps what it decorates elsewhere than in its closure.
    """
    if not isinstance(function, types.FunctionType):
        raise NotFusedError(_UNUSUAL)
    names, cells = function.__globals__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names, new = {**names, **replaced}, None
    else:
        new = with_globals(inner, replaced)
        if not any(cell.cell_contents is inner for cell in cells or ()):
            raise NotFusedError(_UNUSUAL)
        cells = tuple(types.CellType(new) if cell.cell_contents is inner else cell for cell in cells or ())
    other = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    other.__kwdefaults__ = function.__kwdefaults__
    vars(other).update(vars(function) if new is None else {**vars(function), "__wrapped__": new})
    return other


_UNUSUAL = "its forward is decorated in an unusual way"


def eps_of(module: nn.Module) -> Any:
    """The number that a norm adds to the mean square, by the names that it has in transformers."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
