"""Whether sums have a fixed order, as set in PyTorch or in this package's environment variable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

#: "1": warps of CUDA kernels take pages in a fixed order; "0": as they finish; not set:
#: `torch.use_deterministic_algorithms` decides
VARIABLE = "HF_LOWBIT_KV_DETERMINISTIC"


def fixed_order() -> bool:
    """Whether a step that is computed twice must be equal to the last bit, which takes 2 to 6 % longer.

    Raises:
        ValueError: the variable is neither "0" nor "1".
    """
    setting = os.environ.get(VARIABLE) or None  # set to nothing is not set
    if setting not in (None, "0", "1"):
        raise ValueError(f"{VARIABLE}={setting!r} is not allowed; it must be '0' or '1'")
    return torch.are_deterministic_algorithms_enabled() if setting is None else setting == "1"


@contextlib.contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    """Within the context, PyTorch uses deterministic algorithms. Afterwards its mode, `warn_only` too, is restored."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
