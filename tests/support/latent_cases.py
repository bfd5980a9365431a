"""Checks of the latent kernels, on a GPU and in the emulator: attention against float32 over the same packed bytes, and stored
bytes against the reference's."""

import dataclasses
from dataclasses import dataclass

import torch

from hf_lowbit_kv.backends.choice import storage_spec
from hf_lowbit_kv.eval.benchmarks import snapmla_pipeline
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels.cuda.cuda_entry_points import launches


@dataclass(frozen=True)
class LatentCase:
    """lengths: tokens of each row. spread: size of the RoPE parts. jump: factor between the latents of neighbouring blocks."""

    lengths: tuple[int, ...] = (130, 1)
    heads: int = 16
    tokens: int = 1
    rank: int = 128
    rope: int = 32
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    padded: bool = False
    spread: float = 1.0
    jump: float = 1.0
    zeros: bool = False
    content: str = "fp8"
    layout: str = "cuda"
    """as the pages of which backend are ordered"""

    @property
    def spec(self) -> LayerSpec:
        return storage_spec(LayerSpec.parse(f"{self.content}|dense|0|0|{self.page_size}|none|none|latent"), self.layout)

    @property
    def scaling(self) -> float:
        return (self.rank + self.rope) ** -0.5 / self.spread

    def __str__(self) -> str:
        default = LatentCase()
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return "-".join(f"{k}{v}" for k, v in shown.items() if v != getattr(default, k)).replace(" ", "") or "default"


class Filled:
    """A layer that holds the case's tokens, and a chunk that comes next."""

    def __init__(self, case: LatentCase, device: str, seed: int, room: int = 64):
        self.case, self.generator = case, torch.Generator(device).manual_seed(seed)
        longest, batch = max(case.lengths), len(case.lengths)
        capacity = longest + case.tokens + room
        self.store = PagedStore(case.spec, batch, 1, case.rank, case.rope, case.dtype, device, capacity)
        c, r = self.latents(longest)
        self.rows = [(c[b : b + 1, :, :n], r[b : b + 1, :, :n]) for b, n in enumerate(case.lengths)]
        real = torch.arange(longest, device=device) < torch.tensor(case.lengths, device=device)[:, None]
        if longest:
            reference.OPERATIONS.append(StepInputs(None, c, r, real), self.store)
        self.chunk()

    def random(self, *shape: int) -> torch.Tensor:
        device = self.generator.device
        return torch.randn(*shape, generator=self.generator, device=device).to(self.case.dtype)

    def latents(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        case, batch = self.case, len(self.case.lengths)
        c, r = self.random(batch, 1, tokens, case.rank), self.random(batch, 1, tokens, case.rope) * case.spread
        block = torch.arange(tokens, device=c.device) // 64 % 2
        c = (c.float() * torch.where(block == 1, case.jump, 1.0)[:, None]).to(case.dtype)
        return (torch.zeros_like(c) if case.zeros else c), r

    def chunk(self) -> None:
        """The next query and the next tokens."""
        case, batch = self.case, len(self.case.lengths)
        self.q = self.random(batch, case.heads, case.tokens, case.rank + case.rope)
        self.k, self.v = self.latents(case.tokens)
        self.mask = None
        if case.padded:
            self.mask = torch.rand(batch, case.tokens, generator=self.generator, device=self.q.device) < 0.6
            self.v = self.v.masked_fill(~self.mask[:, None, :, None], float("nan"))

    @property
    def step(self) -> StepInputs:
        return StepInputs(self.q, self.k, self.v, self.mask, self.case.scaling)


def exact(filled: Filled) -> torch.Tensor:
    """float32 attention over the packed bytes."""
    return reference.OPERATIONS.attend(filled.step._replace(q=filled.q.float()), filled.store)


def plain(filled: Filled) -> torch.Tensor:
    """The same in the model's dtype: products and weights are rounded to it."""
    case, state = filled.case, filled.store.state
    outs = []
    longest = int(state.length.max())
    c, r = reference.OPERATIONS.read(PagedStore.over(state, case.spec), max(longest, 1))
    for b in range(len(case.lengths)):
        n = int(state.length[b, 0])
        c_all = torch.cat([c[b, 0, :n], filled.k[b, 0]])
        r_all = torch.cat([r[b, 0, :n], filled.v[b, 0]])
        position = torch.arange(n + case.tokens, device=c.device)
        valid = position[None] <= n + torch.arange(case.tokens, device=c.device)[:, None]
        if filled.mask is not None:
            valid = valid & torch.cat([position[:n] >= 0, filled.mask[b]])[None]
            r_all = r_all.nan_to_num(0.0)
        scores = (filled.q[b] @ torch.cat([c_all, r_all], -1).T).float() * case.scaling
        weights = torch.softmax(scores.masked_fill(~valid, float("-inf")), -1).nan_to_num(0.0).to(case.dtype)
        outs.append((weights @ c_all).transpose(0, 1))
    return torch.stack(outs)


def pipeline(filled: Filled) -> torch.Tensor:
    """With queries and weights in FP8, too."""
    v = filled.v.nan_to_num(0.0)
    return snapmla_pipeline.attend(filled.step._replace(v=v), filled.store)


def check_attend(kernels, case: LatentCase, device: str, seed: int, wide: bool = False) -> None:
    """The 2x rule: the kernel's error is at most twice that of the plain computation in the model's dtype. Of the wide kernel
    it is at most twice that of the pipeline that quantizes queries and weights."""
    filled = Filled(case, device, seed)
    before = launches.get("latent_wide_attend", 0)
    found = getattr(kernels, "OPERATIONS", kernels).attend(filled.step, filled.store).float()
    assert launches.get("latent_wide_attend", 0) == before + wide
    truth = exact(filled)
    assert torch.isfinite(found).all()
    error, allowed = ((x.float() - truth).norm() for x in (found, pipeline(filled) if wide else plain(filled)))
    rounding = torch.finfo(case.dtype).eps * truth.norm()
    assert error <= 2 * allowed + 0.5 * rounding, (
        f"seed {seed}: {error / truth.norm():.2e}, plain {allowed / truth.norm():.2e}"
    )
    if case.zeros:
        assert torch.equal(found, found * 0) or case.tokens > 0


def sizes(x: torch.Tensor) -> torch.Tensor:
    """Norm of each head of `[B, S, Hq, rank]`, `[Hq]`."""
    return x.movedim(2, 0).flatten(1).norm(dim=1)


def check_sizes_of_queries(kernels, case: LatentCase, device: str, seed: int, wide: bool = False) -> None:
    """Heads whose queries are 1e-6 to 1e3 of the usual size, those of every other head only in the content, and all zeros in
    the first: `check_attend`'s rule for each head by itself."""
    filled = Filled(case, device, seed)
    size = torch.logspace(-6, 3, case.heads, device=device)[:, None, None].repeat(1, 1, case.rank + case.rope)
    size[::2, :, case.rank :] = 1
    size[0] = 0
    filled.q = (filled.q.float() * size).to(case.dtype)
    found, truth = kernels.OPERATIONS.attend(filled.step, filled.store).float(), exact(filled)
    error, allowed = (sizes(x.float() - truth) for x in (found, pipeline(filled) if wide else plain(filled)))
    rounding = torch.finfo(case.dtype).eps * sizes(truth)
    assert (error <= 2 * allowed + 0.5 * rounding).all(), f"seed {seed}: {error / allowed}"


def check_steps(kernels, case: LatentCase, steps: int, device: str, seed: int) -> None:
    """Steps that attend and store: outputs as `attend` gives them, bytes and counters as the reference leaves them."""
    filled = Filled(case, device, seed)
    twin = Filled(case, device, seed)
    for _ in range(steps):
        filled.chunk(), twin.chunk()
        expected = kernels.OPERATIONS.attend(filled.step, filled.store)
        assert torch.equal(kernels.OPERATIONS.step(filled.step, filled.store), expected)
        reference.OPERATIONS.append(StepInputs(None, twin.k, twin.v.nan_to_num(0.0), twin.mask), twin.store)
        compare(filled.store, twin.store)


def check_append(kernels, case: LatentCase, chunks: list[int], device: str, seed: int) -> None:
    """Chunks stored by the kernels: the reference's bytes."""
    filled, twin = Filled(case, device, seed), Filled(case, device, seed)
    for tokens in chunks:
        part = dataclasses.replace(case, tokens=tokens)
        for each in (filled, twin):
            each.case = part
            each.chunk()
        kernels.OPERATIONS.append(StepInputs(None, filled.k, filled.v, filled.mask), filled.store)
        reference.OPERATIONS.append(StepInputs(None, twin.k, twin.v.nan_to_num(0.0), twin.mask), twin.store)
        compare(filled.store, twin.store)


def compare(found: PagedStore, expected: PagedStore) -> None:
    for name in ("length", "paged", "lost"):
        assert torch.equal(getattr(found.state, name), getattr(expected.state, name)), name
    assert torch.equal(found.state.pool[0], expected.state.pool[0]), "packed bytes"
