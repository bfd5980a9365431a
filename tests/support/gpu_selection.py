"""Which cases of the kernels' matrices `make gpu-test` has: one for each path of the kernels. `make gpu-test-all` has all.

Most of the time of a run goes into compiling kernels, so a case counts by what it compiles.
"""

import re

import torch
from kernel_cases import Case
from kernel_matrix import EIGEN_2, EIGEN_3

#: pairs of formats whose kernels have the paths of another pair's, with another width or number of channels
SAME_PATHS = [
    *(("int2-channel", "int2-token"), ("int6-token", "int6-token"), ("int8-token", "int8-token")),
    *(("boosted2-r0.25", "int2-token"), tuple(EIGEN_3.values())),
]
#: pairs with paths of their own. `int4-channel/int4-token` meets every shape; these meet those that their paths depend on
OWN_PATHS = [("boosted2-r0.125", "int2-token"), ("fp8", "fp8"), ("fp8-centered", "fp8")]
OWN_PATHS += [tuple(EIGEN_2.values())]
#: what stores boosted channels: each way to choose them, none and all of them, on either side
BOOSTED_STORES = [
    *(("boosted2-r0.125", "int5-token-g32"), ("boosted2-r0.3-range", "int8-token"), ("fp8", "boosted2-r1")),
    *(("int4-channel", "boosted2-r0.125-random3"), ("boosted2-r0.25", "boosted2-r0.125-variance")),
    ("boosted2-r0", "int5-channel"),
]


def _other_width(name: str) -> bool:
    """Whether a format has the paths of `int4-channel-g32`, or of another in groups, with another width."""
    return re.fullmatch(r"int[2568]-(channel|token)-g\d+", name) is not None


def _decides_a_path(case: Case) -> bool:
    """Of the shapes that all pairs meet: whether a pair of `OWN_PATHS` meets it in every run."""
    if len(case.lengths) == 1:  # exactly a page, and one token more
        return (case.lengths[0], case.residual) in ((128, 0), (129, 128))
    if case.capacity is not None or case.value_offset is not None or case.key_size != 1:
        return False
    if case.outliers:
        return case.dtype == torch.float16
    if case.sinks or case.groups == 16:
        return case.tokens > 1
    if case.tokens > 1:
        return case.head_dim in (96, 256)
    return (
        (case.head_dim in (64, 96, 256) and case.groups > 1) or case.dtype == torch.float32 or case.spread is not None
    )


def in_every_run(case: Case) -> bool:
    """Whether `make gpu-test` has a case of attention."""
    if len(case.lengths) == 40:  # the reference on the CPU takes 20 s
        return case.keys == "int4-channel"
    if case.keys.startswith("vq-") and len(case.lengths) == 3:
        bits = int(case.keys.partition("b")[2])
        if case.head_dim == 128:
            return bits in (3, 8, 12)
        return case.head_dim == 80 or (case.groups, case.tokens) == (4, 1)
    if case.keys.startswith("vq-") and case.lengths == (40000,):
        return False
    if (case.keys, case.values) in SAME_PATHS:
        return case.page_size != 128
    if (case.keys, case.values) in OWN_PATHS and case.page_size == 128 and case.residual in (0, 128):
        return _decides_a_path(case)
    return case.page_size != 128 or not _other_width(case.keys)


def is_stored_in_every_run(case: Case) -> bool:
    """The same for what is stored: boosted channels take longest; tokens that are stored straight into pages in formats that
    have none but these."""
    if "boosted" in case.keys + case.values and case.page_size == 128:
        own = (case.keys, case.values) in BOOSTED_STORES and case.residual == 128
        return own and (case.keys != "boosted2-r0.25" or case.head_dim == 80)
    if case.keys == "int2-token" and case.values == "int8-channel":
        return case.head_dim == 80
    if case.head_dim == 128 and case.page_size == 128 and case.keys.startswith("int"):
        # of each width and axis one, and of groups one of each
        if re.fullmatch(r"int\d-(channel|token)-g\d+", case.keys):
            return (case.keys, case.residual) in (("int4-channel-g32", 128), ("int4-token-g64", 0))
        if case.keys in ("int5-channel", "int8-channel", "int2-token", "int6-token"):
            return False
    straight = case.residual == 0 and case.head_dim == 128 and case.page_size == 128
    return in_every_run(case) and (not straight or case.keys.startswith(("int4", "dense", "fp8")))
