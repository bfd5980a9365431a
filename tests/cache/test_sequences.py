"""Random sequences of operations on a cache, in every format: what it holds and answers is what `sequence_truth` says.

`SEQUENCES=n` runs n of them for each kind.
"""

import os

import pytest
from sequence_operations import KINDS, SLOW_KINDS, Append, Crop, Hide, Reorder, Setting, for_each, sequences
from sequences import run

#: sequences of each kind; all together take some fifteen seconds of a CPU
COUNT = int(os.environ.get("SEQUENCES") or 8)
#: the same on a GPU, where each compiles kernels
GPU_COUNT = int(os.environ.get("SEQUENCES") or 4)
#: one kind of each family of kernels, but for static codes, whose kernels take minutes to compile: `make gpu-test`
FAMILIES = [
    *("dense/dense", "int4-channel/int4-token", "int8-token/int8-token", "fp8/fp8", "boosted2-r0.125/int2-token"),
    *("vq-d4b6/vq-d8b5", "latent fp8/dense", "latent dense/dense", "latent fp8-static/fp8"),
]
#: kinds whose transforms are matrix products: their sums, and so their bytes, may differ between devices
PRODUCTS = [kind for kind in KINDS if kind.startswith(("matrix", "eigen"))]
no_limit_of_long_runs = pytest.mark.timeout(0 if "SEQUENCES" in os.environ else 600)


def explore(kind: str, device: str = "cpu", count: int = COUNT) -> None:
    for_each(sequences(), count, kind, lambda sequence: run(kind, *sequence, device))


@no_limit_of_long_runs
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW_KINDS else kind for kind in KINDS]
)
def test_any_sequence(kind, one_thread):
    explore(kind)


@pytest.mark.begins_first
@pytest.mark.gpu
@no_limit_of_long_runs
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in FAMILIES else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
        if kind not in PRODUCTS
    ],
)
def test_any_sequence_on_a_gpu(kind):
    """On the default backend, `cuda` where it serves the setting, and on Triton."""
    explore(kind, "cuda", GPU_COUNT)


#: what random sequences seldom come to
KEPT = {
    "the second of two crops reaches into pages": [Append(96), Crop(30), Crop(20), Append(40)],
    "rows end inside a page, in the window and in the sink": [
        *(Append(150, "left"), Hide((90, 5), 40), Hide((0, 300), 2), Crop(20), Append(60)),
    ],
    "rows that share pages are cropped": [Append(150), Reorder((0, 0)), Crop(90), Append(80, "any")],
    "padding where tokens were cropped": [Append(40, "any"), Crop(20), Append(20, "any"), Crop(15), Append(30)],
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("kind", ["int4-channel/int4-token", "latent fp8/dense"])
def test_kept_sequence(kind, capacity, name):
    run(kind, Setting(rows=2, capacity=capacity), KEPT[name])
