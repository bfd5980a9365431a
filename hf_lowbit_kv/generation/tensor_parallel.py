"""Recorded steps of a model that tensor parallelism spreads over several processes (ranks).

A recorded step contains collectives, so all ranks must record, refuse, drop and replay the same steps. They agree before
each step that is not replayed, and once per call of `generate`; a replay exchanges nothing but its own collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: the module of transformers whose wrappers of `forward` split a layer's input and output
_WRAPPERS = "transformers.distributed."


class Ranks:
    """The processes that share a model.

    Args:
        group: their process group; `None`: the model belongs to one process.
        device: where collectives of this group run.
    """

    def __init__(self, group: Any = None, device: torch.device | None = None):
        self.group, self.device = group, device

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """The ranks of a transformers model."""
        mesh = getattr(model, "_device_mesh", None)
        if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
            return cls()
        tensor_parallel = mesh["tp"] if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh
        return cls(tensor_parallel.get_group(), model.device)

    @property
    def several(self) -> bool:
        return self.group is not None

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank. Waits for all ranks if there are several."""
        if self.group is None:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags)


def local(tensor: Any) -> Any:
    """This rank's part of a parameter; a plain tensor, or `None`, is returned unchanged. Kernels read addresses, and a
    wrapper (`DTensor`) has none."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def splits(module: nn.Module) -> bool:
    """Whether transformers' tensor parallelism has replaced this module's `forward`."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "original", forward)
    return str(getattr(forward, "__module__", "")).startswith(_WRAPPERS)
