"""Keeps layers that the user has compiled compiled inside recorded steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .overriding import ProcessWide

#: inside, code that torch has compiled runs uncompiled, in all threads
_uncompiled = ProcessWide(lambda: torch.compiler.set_stance("force_eager"))
#: inside, recompilation raises, in all threads
_as_compiled = ProcessWide(lambda: torch.compiler.set_stance("fail_on_recompile"))


def recorded_as_compiled(model: nn.Module, capturing: bool = False) -> contextlib.AbstractContextManager:
    """Within the context, compiled layers of the model run compiled. A model that is compiled as a whole runs uncompiled: a
    recorded step captures the launches of the uncompiled model.

    Args:
        capturing: whether the step is being captured. Compilation then raises.
    """
    if _compiled(model):
        return _uncompiled()
    return _as_compiled() if capturing and any(_compiled_parts(model)) else contextlib.nullcontext()


def compilations() -> int:
    """Number of compilations in this process that torch has counted."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["frames"].values())


def why_not_recorded_compiled(model: nn.Module) -> str | None:
    """The reason why the compiled layers of this model cannot be captured, or `None`."""
    if _compiled(model):
        return None
    for name, part in _compiled_parts(model):
        config = part.get_compiler_config() if hasattr(part, "get_compiler_config") else None
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            return (
                f"{name} is compiled with its own CUDA graphs; compile it with another mode than 'reduce-overhead' or "
                "'max-autotune', or without triton.cudagraphs"
            )
    return None


def _compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _compiled_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names of compiled modules and methods, each with the compiled callable."""
    for name, module in model.named_modules():
        if _compiled(module):
            yield name, module._compiled_call_impl or module
        for attribute, value in vars(module).items():
            if hasattr(value, "get_compiler_config") and attribute != "_compiled_call_impl":
                yield f"{name}.{attribute}", value
