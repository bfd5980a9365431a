"""A decode step in one launch of the CUDA kernels, on a GPU: outputs, every byte stored, and counters (without a GPU:
`test_cuda_emulated`)."""

import kernel_checks as kernels
import pytest
import torch
from cuda_cases import fragment
from kernel_cases import Case, check_steps
from kernel_matrix import EIGEN_2, EIGEN_3, GRAPHS

pytestmark = pytest.mark.gpu

STEPS = 140  # more than a page has tokens
FORMATS = [
    *(("dense", "dense"), ("int8-token", "int8-token"), ("int8-channel", "int8-channel"), ("int4-channel", "int4-token")),
    *(("int4-token", "int4-token"), ("int4-token-g32", "int4-channel-g32"), ("int2-channel", "int2-token")),
    *(("int2-token", "int4-channel"), ("boosted2-r0.125", "int2-token"), ("boosted2-r0.25-variance", "int4-token")),
]  # fmt: skip
PAGES = {"head_dim": 128, "page_size": 128, "residual": 128}
CASES = [
    # rows of any length, one long one, many
    Case(
        keys=keys, values=values, head_dim=128, page_size=128, residual=residual, groups=(4, 1, 8)[i % 3],
        lengths=((300, 1, 517), (4000,), tuple(range(0, 1000, 40)))[(i + residual // 128) % 3], sink=(0, 32)[i // 2 % 2],
        padded=(i + residual // 128) % 2 == 0, dtype=(torch.float16, torch.bfloat16)[i // 3 % 2],
        transform="hadamard" if i % 4 == 2 else None,
    )
    for i, (keys, values) in enumerate(FORMATS)
    for residual in (128, 0)
] + [
    # a row among all warp groups; groups and row blocks; several warp groups per CTA; no room left; other sizes
    Case(**PAGES, lengths=(60000,), heads=1),
    Case(**PAGES, keys="int2-channel", values="int2-token", lengths=(2000, 300), groups=16),
    Case(**PAGES, keys="boosted2-r0.125", values="int2-token", lengths=(300, 4000), groups=12, dtype=torch.bfloat16),
    Case(keys="int4-token", values="int4-token", head_dim=128, page_size=128, residual=0, groups=40, lengths=(5000, 3)),
    Case(head_dim=256, page_size=128, residual=0, groups=16, lengths=(500, 130), transform="hadamard"),
    Case(**PAGES, lengths=(1000,) * 32, heads=8, groups=1),
    Case(**PAGES, lengths=(900, 850), capacity=960, sinks=True, softcap=30.0),
    Case(keys="int8-token", values="int2-token", residual=0, lengths=(480, 300), capacity=512),
    Case(keys="boosted2-r0.3-range", values="int2-token", head_dim=80, head_dim_v=96, residual=5, lengths=(333, 40)),
    Case(**PAGES, **EIGEN_2, lengths=(300, 1, 517), sink=32, transform="hadamard", value_transform="hadamard"),
    Case(**PAGES, **EIGEN_2, lengths=tuple(range(0, 1000, 40)), groups=1, padded=True, dtype=torch.bfloat16),
    Case(**PAGES, **EIGEN_3, lengths=(4000,), groups=8, dtype=torch.bfloat16),
    Case(**EIGEN_3, lengths=(300, 40), residual=5, padded=True),
]  # fmt: skip


@pytest.fixture
def launch():
    from hf_lowbit_kv.triton_kernels.cuda import cuda_entry_points as launch

    return launch


def _in_every_run(case: Case) -> bool:
    """Without those that have the paths of another: widths, and tokens that are stored straight into pages."""
    if (case.keys, case.values) in (
        ("int8-channel", "int8-channel"),
        ("int4-token", "int4-token"),
        tuple(EIGEN_3.values()),
    ):
        return case.page_size != 128 or case.groups == 40
    if len(case.lengths) == 32:
        return False
    return case.residual != 0 or case.keys in ("int4-channel", "int8-token", "boosted2-r0.125")


@pytest.mark.parametrize(
    "case", [case if _in_every_run(case) else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_steps(case, launch):
    check_steps(launch, fragment(case), STEPS, kernels.SEED, "cuda")


class Replayed:
    """In place of `fused_step`: the first step is captured in a CUDA graph, and all are replays of it."""

    def __init__(self):
        self.graph = self.here = self.out = None

    def __call__(self, launch, case, step, store):
        if self.graph is None:
            self._capture(launch, case, step, store)
        for name in ("q", "k", "v"):
            getattr(self.here, name).copy_(getattr(step, name))
        self.graph.replay()
        return self.out.clone()

    def _capture(self, launch, case, step, store):
        self.here = here = step.to("cpu").to("cuda")

        def run():
            return launch.OPERATIONS.step(here.inputs(case), store)

        tensors = store.state.tensors()
        before = [x.clone() for x in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = run()


@pytest.mark.parametrize("options", GRAPHS, ids=str)
def test_replayed(options, launch):
    case = fragment(Case(head_dim=128, page_size=128, capacity=600, lengths=(250, 380), **options))
    check_steps(launch, case, STEPS, kernels.SEED, "cuda", run=Replayed())
