"""Fused pieces in a decode step: tests their accuracy, and places them in a model for the duration of a step.

A piece replaces the `forward` of its modules' instances, during one step and in one thread; other threads get the
module's own. In a first step every piece computes both results. The step continues with the module's own result, and
the kernel's result is compared with float64. Later steps use the kernel if its error is at most twice the module's plus
one rounding.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ..storage.process_stamps import Unstamped
from .fused_pieces import KINDS, NotFusedError, Piece, Unfused, own_forward, why_no_kernels
from .piece_finder import Behaviour, find_pieces

#: if a result differs from the formula by more than this part of its row's largest number, the module has another formula
_ANOTHER_FORMULA = 2**-5
#: one thread at a time places pieces in models
_placing = threading.RLock()


class Substitute(Unstamped):
    """Replaces a module's `forward`, for the thread that put it there."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self.original, self._forward, self._thread = own_forward(module), forward, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._forward if threading.get_ident() == self._thread else self.original
        return run(*args, **kwargs)


@contextlib.contextmanager
def substituted(placed: dict[nn.Module, Substitute]) -> Iterator[None]:
    """Context in which these modules have these `forward`s. Afterwards, and after an error, their own are restored."""
    with _placing:
        before = {module: vars(module).get("forward") for module in placed}
        try:
            for module, forward in placed.items():
                vars(module)["forward"] = forward
            yield
        finally:
            for module, forward in placed.items():
                if vars(module).get("forward") is forward:
                    del vars(module)["forward"]
                    if before[module] is not None:
                        vars(module)["forward"] = before[module]


class Fusion:
    """Which pieces of a model a step computes by kernels. Refers to no module, so a model can be freed.

    Args:
        why_not: the reason why all pieces stay unfused, or `None`.
    """

    def __init__(self, why_not: str | None = None):
        self._why_not = why_not
        self._behaviour = Behaviour()  # three steps look for the pieces
        self._reasons: dict[tuple[str, str], dict[str, str]] = {}  # for each piece: the variants that failed
        self._variants: dict[tuple[str, str], str] = {}  # for each piece: the variant that is accurate
        self._report: list[tuple[str, str, str | None]] = []
        self.settled = why_not is not None
        """whether the accuracy of every piece is known"""

    @property
    def any(self) -> bool:
        """Whether a step has fused pieces, as far as known."""
        return self._why_not is None and (not self.settled or bool(self._variants))

    def give_up(self, reason: str) -> None:
        """Make all later steps unfused."""
        self._why_not, self.settled = reason, True

    @contextlib.contextmanager
    def observing(self, model: Any) -> Iterator[None]:
        """Within the context, a step is unfused, and kernels compute their results in addition.

        Afterwards the accuracy of these kernels is known. If a piece's variant has failed and the piece has another variant,
        `settled` stays `False`, and another step is needed.
        """
        for thread in _ahead.pop(model, ()):
            thread.join()
        try:
            pieces, unfused = _sorted(find_pieces(model, self._behaviour))
        except Exception as error:  # a model that has modules of other kinds than torch's
            self.give_up(f"{type(error).__name__}: {error}")
            yield
            return
        watches = {
            piece: _Watch(piece, variant) for piece in pieces if (variant := self._next_variant(piece)) is not None
        }
        with substituted(_substitutes((piece, watch) for piece, watch in watches.items())):
            yield
        answers = _answers([each for watch in watches.values() for each in watch.errors])
        for piece, watch in watches.items():
            key = piece.kind, piece.name
            if (reason := watch.verdict(answers)) is None:
                self._variants[key] = watch.variant
            elif watch.calls == 0:  # no other variant is called either
                self._reasons.setdefault(key, {}).update(dict.fromkeys(piece.variants, reason))
            else:
                self._reasons.setdefault(key, {})[watch.variant] = reason
        self.settled = all(self._next_variant(piece) is None for piece in pieces)
        self._report = [*unfused]
        for piece in pieces:
            key = piece.kind, piece.name
            failed = self._reasons.get(key, {})
            self._report += piece.counted(self._variants.get(key), next(iter(failed.values()), ""))

    def _next_variant(self, piece: Piece) -> str | None:
        """The variant to try next; `None` if one is accurate or all have failed."""
        key = piece.kind, piece.name
        failed = self._reasons.get(key, {})
        return (
            None
            if key in self._variants
            else next((variant for variant in piece.variants if variant not in failed), None)
        )

    @contextlib.contextmanager
    def in_force(self, model: Any) -> Iterator[None]:
        """Within the context, kernels compute the accurate pieces in this thread's steps of the model."""
        if not self.any:
            yield
            return
        pieces, _ = _sorted(find_pieces(model, self._behaviour))
        variants = {piece: self._variants.get((piece.kind, piece.name)) for piece in pieces}
        calls = ((piece, _Fused(piece, variant)) for piece, variant in variants.items() if variant is not None)
        with substituted(_substitutes(calls)):
            yield

    def report(self) -> str:
        """For `summary()`: how many pieces of each kind are fused, and why the others are not."""
        if self._why_not is not None:
            return f"nothing: {self._why_not}"
        parts = []
        for kind in KINDS:
            rows = [(name, reason) for each, name, reason in self._report if each == kind]
            if not rows:
                continue
            by_reason: dict[str, list[str]] = {}
            for name, reason in rows:
                if reason is not None:
                    by_reason.setdefault(reason, []).append(name)
            fused = sum(reason is None for _, reason in rows)
            reasons = "; ".join(f"{_shortened(names)}: {reason}" for reason, names in by_reason.items())
            parts.append(f"{kind} {fused}/{len(rows)}" + (f" ({reasons})" if reasons else ""))
        return ", ".join(parts) or "nothing: no piece is known"


def compile_ahead(model: Any, rows: int) -> None:
    """Compile the kernels of this model's pieces in threads while a prompt is read: once for each model for one row,
    and once for several rows. An error is not raised here; the step that needs the kernel gets it.

    Args:
        rows: rows of a step.
    """
    done = _compiled.setdefault(model, set())
    if rows > MAX_FUSED_ROWS or (rows == 1) in done or why_nothing_fused(model) or why_no_kernels(model.device.type):
        return
    done.add(rows == 1)

    def compiled(piece: Piece, arguments: tuple[torch.Tensor, ...]) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            piece.kernels(piece.variants[0], *arguments)

    def work() -> None:
        from ..triton_kernels.common import interpreted

        # much of a compilation is an assembler and a C compiler, processes that two threads start side by side. Triton's
        # interpreter serves one thread at a time
        with contextlib.suppress(Exception), ThreadPoolExecutor(1 if interpreted() else 2) as pool:
            seen = set()
            for piece in find_pieces(model):
                if not isinstance(piece, Piece) or (arguments := piece.example(rows)) is None:
                    continue
                kernel = piece.kind, piece.variants[0], *((x.shape, x.dtype) for x in arguments)
                if kernel not in seen:
                    seen.add(kernel)
                    pool.submit(compiled, piece, arguments)

    thread = threading.Thread(target=work, name="hf-lowbit-kv-compile")
    _ahead.setdefault(model, []).append(thread)
    thread.start()


def compiling(model: Any) -> bool:
    """Whether kernels of this model's pieces are being compiled. A step that needs them would wait."""
    return any(thread.is_alive() for thread in _ahead.get(model, ()))


#: largest number of rows for which products are fused
MAX_FUSED_ROWS = 16
#: models whose kernels are compiling or compiled, and for which steps: with one row, with several
_ahead: weakref.WeakKeyDictionary[Any, list[threading.Thread]] = weakref.WeakKeyDictionary()
_compiled: weakref.WeakKeyDictionary[Any, set[bool]] = weakref.WeakKeyDictionary()


def why_nothing_fused(model: Any) -> str | None:
    """Why all pieces of this model stay unfused, or `None`."""
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    if any(hooks):
        return "hooks of all modules"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    return "train()" if model.training else None


def _sorted(candidates: Iterator[Piece | Unfused]) -> tuple[list[Piece], list[Unfused]]:
    pieces: list[Piece] = []
    unfused: list[Unfused] = []
    for each in candidates:
        if isinstance(each, Piece):
            pieces.append(each)
        else:
            unfused.append(each)
    return pieces, unfused


def _shortened(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _substitutes(calls: Iterator[tuple[Piece, Callable[..., Any]]]) -> dict[nn.Module, Substitute]:
    return {
        module: Substitute(module, forward) for piece, call in calls for module, forward in piece.substitutions(call)
    }


class _Fused:
    """Compute a piece by its kernel, or by its module if the kernel does not take the arguments."""

    def __init__(self, piece: Piece, variant: str):
        self._piece, self._variant = piece, variant

    def __call__(self, *args: Any) -> Any:
        try:
            return self._piece.fused(self._variant, *args)
        except NotFusedError:
            return self._piece.unfused(*args)


class _Watch:
    """Compute a piece by its module, and compare the result with its kernel's."""

    def __init__(self, piece: Piece, variant: str):
        self._piece, self.variant = piece, variant
        self.calls = 0
        self._reason: str | None = None
        self.errors: list[Errors] = []

    def __call__(self, *args: Any) -> Any:
        out = self._piece.unfused(*args)
        self.calls += 1
        if self._reason is None:
            try:
                for fused, unfused, exact in self._piece.compared(self.variant, out, *args):
                    if (fused.shape, fused.dtype) != (unfused.shape, unfused.dtype):
                        raise NotFusedError(f"its result has dtype {str(unfused.dtype).removeprefix('torch.')}")
                    self.errors.append(errors_of(fused, unfused, exact))
            except NotFusedError as error:
                self._reason = str(error)
            except Exception as error:  # a kernel that does not compile here, no memory to compare
                self._reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return out

    def verdict(self, answers: dict[Errors, tuple[bool, bool]]) -> str | None:
        """Why the kernel may not be used, or `None`. answers: see `_answers`."""
        if (reason := self._reason or self._piece.mismatch) is not None:
            return reason
        if self.calls == 0:
            return self._piece.unused
        if not all(answers[each][0] for each in self.errors):
            return "it computes something else"
        near = all(answers[each][1] for each in self.errors)
        return None if near else "the kernel's error is above twice the module's"


class Errors:
    """Errors of a kernel's result and of its module's result, relative to the exact result.

    Args:
        largest: float64 `[3, rows]`: in each row, the largest error of the kernel, the largest error of the module, and the
            largest exact number.
        eps: machine epsilon of the results' dtype.
    """

    def __init__(self, largest: torch.Tensor, eps: float):
        self.largest, self.eps = largest, eps


def errors_of(fused: torch.Tensor, unfused: torch.Tensor, exact: torch.Tensor) -> Errors:
    """The errors of both results, of the same shape and dtype; a row is their last dimension. exact: in float64."""
    largest = torch.stack([fused - exact, unfused - exact, exact]).abs().amax(-1).flatten(1)
    return Errors(largest, torch.finfo(unfused.dtype).eps)


def _answers(errors: list[Errors]) -> dict[Errors, tuple[bool, bool]]:
    """`agreement` for each. All of one shape are computed together, because each of a model's hundreds of pieces would
    launch twenty kernels and wait for the device."""
    alike: dict[Any, list[Errors]] = {}
    for each in errors:
        alike.setdefault((each.largest.shape, each.largest.device, each.eps), []).append(each)
    return {
        each: (same, near)
        for group in alike.values()
        for each, (same, near) in zip(
            group, agreement(torch.stack([each.largest for each in group]), group[0].eps).tolist(), strict=True
        )
    }


def agreement(largest: torch.Tensor, eps: float) -> torch.Tensor:
    """Two answers for each of `n` comparisons, bool `[n, 2]`. Do both results come from the formula of the exact one? Is the
    kernel's error at most twice the module's plus one rounding (`eps` times the row's largest number)? Rows that are not
    finite are ignored.

    Args:
        largest: float64 `[n, 3, rows]`, see `Errors.largest`.
        eps: machine epsilon of the results' dtype.
    """
    of_fused, of_plain, size = largest.unbind(1)
    same = torch.maximum(of_fused, of_plain) <= _ANOTHER_FORMULA * size
    near = of_fused <= 2 * of_plain + eps * size
    counts = of_plain.isfinite() & size.isfinite()
    return torch.stack([(same | ~counts).all(1) & counts.any(1), (near | ~counts).all(1)], dim=1)
