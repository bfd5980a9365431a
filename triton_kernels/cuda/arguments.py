"""The single argument of each kernel: structures that mirror those in the sources, and functions that fill them.

A kernel takes its argument by value. The sources declare the same fields in the same order: `AttendArgs` is `Args` in
`common.cuh`, `StepArgs` is in `store_in_attend.cuh`, `AppendArgs` in `store.cuh`, `TransformArgs` in `transform.cu`,
`ProjectArgs` in `project.cu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...storage.paged_store import PagedStore
from ...storage.step import StepInputs
from ...storage.transforms import Fused
from ..common import format_records

#: the formats' parameters, see `tables`
_TABLES = [
    ("key_table", ctypes.c_void_p),
    ("key_table_h", ctypes.c_longlong),
    ("value_table", ctypes.c_void_p),
    ("value_table_h", ctypes.c_longlong),
]


class AttendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v mask sinks pool address sink_k sink_v tail_k tail_v".split()),
        *((name, ctypes.c_void_p) for name in "length paged out partial counters".split()),
        *((name, ctypes.c_longlong) for name in "q_b q_h q_s k_b k_h k_s v_b v_h v_s mask_b mask_s".split()),
        *((name, ctypes.c_int) for name in "batch heads groups tokens pages sink tail warp_groups assignment".split()),
        *((name, ctypes.c_float) for name in "scaling softcap".split()),
        *((name, ctypes.c_void_p) for name in "raw_k q_scale k_scale score_bias".split()),
        *((name, ctypes.c_longlong) for name in "raw_b raw_h raw_s scale_h".split()),
        *_TABLES,
    ]


class AppendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "k v mask order count pool address sink_k sink_v tail_k tail_v".split()),
        *((name, ctypes.c_void_p) for name in "length paged lost".split()),
        *((name, ctypes.c_longlong) for name in "k_b k_h k_s v_b v_h v_s mask_b".split()),
        *((name, ctypes.c_int) for name in "heads tokens pages room sink tail residual".split()),
        *_TABLES,
    ]


class StepArgs(ctypes.Structure):
    _fields_ = [*AttendArgs._fields_, ("append", AppendArgs), ("arrived", ctypes.c_void_p)]


class TransformArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k q_out k_out q_scale k_scale".split()),
        *((name, ctypes.c_longlong) for name in "q_b q_h q_s k_b k_h k_s rows scale_h".split()),
        *((name, ctypes.c_int) for name in "q_heads heads tokens".split()),
    ]


class ProjectArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in "q k v q_out k_out v_out q_matrix k_matrix k_center score_bias".split()),
        *((name, ctypes.c_longlong) for name in "q_b q_h q_s k_b k_h k_s v_b v_h v_s matrix_h".split()),
        *((name, ctypes.c_int) for name in "batch q_heads heads tokens".split()),
    ]


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class Factors(NamedTuple):
    """Addresses of a transform's factors for queries, and for keys or values; the stride from one KV head's factors to the
    next's, in elements."""

    queries: int = 0
    keys: int = 0
    stride: int = 0


def factors(fused: Fused, tensors: Sequence[torch.Tensor]) -> Factors:
    if not fused.scaled:
        return Factors()
    keys, queries = tensors[:2]
    return Factors(queries.data_ptr(), keys.data_ptr(), keys.stride(0) if keys.shape[0] > 1 else 0)


class Tables(NamedTuple):
    """The records of a layer's formats: addresses, and the stride in bytes from one KV head's to the next's (0: shared by all
    heads)."""

    keys: int
    keys_stride: int
    values: int
    values_stride: int

    @property
    def per_head(self) -> bool:
        return bool(self.keys_stride or self.values_stride)


def tables(store: PagedStore) -> Tables:
    (keys, keys_stride), (values, values_stride) = format_records(store)
    return Tables(keys.data_ptr(), keys_stride, values.data_ptr(), values_stride)


def set_layer_fields(args: AttendArgs | AppendArgs, store: PagedStore) -> None:
    """Set the fields that depend only on the layer: addresses of its tensors, and their capacities."""
    state, spec = store.state, store.spec
    pages = state.page_address.shape[1]
    args.pool, args.address = state.pool[0].data_ptr(), state.page_address.data_ptr()
    for name in ("sink_k", "sink_v", "tail_k", "tail_v", "length", "paged"):
        setattr(args, name, getattr(state, name).data_ptr())
    args.pages, args.sink, args.tail = pages, spec.sink, spec.tail_size
    args.key_table, args.key_table_h, args.value_table, args.value_table_h = tables(store)
    if isinstance(args, AppendArgs):
        args.lost, args.room, args.residual = state.lost.data_ptr(), spec.room(pages), spec.residual


def append_args(
    inputs: StepInputs, store: PagedStore, order: torch.Tensor | None = None, count: torch.Tensor | None = None
) -> AppendArgs:
    """The argument of `append.cu`. order, count: the indices of the real new tokens, if some are padding, int32 `[B, S]`, and
    their number `[B]`."""
    k, v, mask = inputs[1:4]
    args = AppendArgs(k=k.data_ptr(), v=v.data_ptr(), mask=address(mask), order=address(order), count=address(count))
    set_layer_fields(args, store)
    args.heads, args.tokens = k.shape[1:3]
    args.k_b, args.k_h, args.k_s = k.stride()[:3]
    args.v_b, args.v_h, args.v_s = v.stride()[:3]
    args.mask_b = 0 if mask is None else mask.stride(0)
    return args
