"""Cases for the kernels: a layer's state filled by the reference, and comparisons with the reference."""

from __future__ import annotations

import copy
import dataclasses
import zlib

import torch

from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import LayerState, PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import parse_transform


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer: geometry, formats, and how many tokens each row holds before the step."""

    keys: str = "int4-channel"
    values: str = "int4-token"
    lengths: tuple[int, ...] = (100, 37)
    heads: int = 2
    groups: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float16
    tokens: int = 1
    sink: int = 4
    residual: int = 32
    page_size: int = 32
    softcap: float | None = None
    sinks: bool = False
    padded: bool = False
    capacity: int | None = None
    outliers: bool = False
    heavy_sink: float | None = None
    """by how much the first token's score, with a value of 0, is above all others together"""
    value_offset: float | None = None
    """what the first channel of values is everywhere; errors are then those of the others"""
    key_offset: float | None = None
    """what is added to the first two channels of keys, as a large bias adds it"""
    key_size: float = 1.0
    """a factor of keys; queries are divided by it"""
    value_size: float = 1.0
    """a factor of values"""
    spread: str | None = None
    """"keys" or "values": their scales are drawn over twelve orders of magnitude, of each token where the format has such, else
    of each channel; queries weight them so that all count"""
    ties: bool = False
    """entries of codebooks are multiples of a half: many are equal, or equally near"""
    transform: str | None = None
    value_transform: str | None = None

    def __str__(self) -> str:
        shown = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)
                 if getattr(self, field.name) != field.default]  # fmt: skip
        return ",".join(shown).replace(" ", "").replace("torch.", "") or "default"

    @property
    def spec(self) -> LayerSpec:
        formats = parse_format(self.keys), parse_format(self.values)
        transforms = parse_transform(self.transform), parse_transform(self.value_transform)
        return LayerSpec(*formats, self.sink, self.residual, self.page_size, *transforms)

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim


def generator(case: Case, seed: int) -> torch.Generator:
    print(f"seed {seed}")  # shown when a test fails
    return torch.Generator().manual_seed(seed + zlib.crc32(str(case).encode()))


def random_tokens(case: Case, tokens: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B, H, tokens, D]`, transposed views as a model hands them over; channels differ in size and mean."""
    out = []
    for dim in case.dims:
        x = torch.randn(len(case.lengths), tokens, case.heads, dim, generator=gen)
        x = x * (torch.rand(dim, generator=gen) + 0.2) + torch.randn(dim, generator=gen)
        if case.outliers and tokens:
            x[:, ::7] = 0.0
            x[:, 1::5] = x[:, 1::5, :, :1]
            x[:, 2::11, :, 0] = 30000.0
            x[:, 3::13, :, 1] = -65000.0
        if case.heavy_sink is not None:
            x *= 2.0**-5
        x *= case.value_size if out else case.key_size
        if case.key_offset is not None and not out:
            x[..., :2] += case.key_offset
        out.append(x.to(case.dtype).transpose(1, 2))
    if case.spread is not None:
        put_spread(case, *out, gen)
    if case.value_offset is not None:
        out[1][..., 0] = case.value_offset
    return out[0], out[1]


def random_mask(rows: torch.Tensor, tokens: int, gen: torch.Generator) -> torch.Tensor:
    """bool `[B, tokens]` with `rows[b]` tokens at random places."""
    order = torch.rand(len(rows), tokens, generator=gen).argsort(1)
    return order < rows[:, None]


def store_for(case: Case, device: str, poison: bool = True) -> PagedStore:
    geometry = case.spec, len(case.lengths), case.heads, *case.dims, case.dtype, device, case.capacity
    store = PagedStore(*geometry, parameters=records_for(case.spec, case.dims, case.heads, device, case))
    if case.capacity is None:
        store.reserve(min(case.lengths))  # rows' pages lie in several slabs
        store.reserve(max(case.lengths) + case.tokens)
    if poison:
        poison_state(store.state)
    return store


def records_for(
    spec: LayerSpec, dims: tuple[int, int], heads: int, device: str = "cpu", case: Case | None = None
) -> list[torch.Tensor]:
    """Records of random parameters, always the same ones; each differs from head to head. case: whose tokens calibrated steps
    and centers go with."""
    gen, given = torch.Generator().manual_seed(7), {}
    for name, shape, dtype in spec.parameters(*dims, heads):
        x = torch.randn(shape, generator=gen)
        if name.endswith("matrix"):
            x = torch.linalg.qr(x)[0] + 0.1 * torch.eye(shape[-1])
        x = x if name.endswith(("matrix", "codebook")) else x.abs() + 0.5
        if case is not None and case.ties and name.endswith("codebook"):
            x = (2 * x).round() / 2
        if case is not None and name.endswith(("center", "step")):
            keys = name.startswith("key")
            x = x * (case.key_size if keys else case.value_size)
            if keys and case.spread == "keys":
                x = x * spread_scales(case) * 0.5
        given[name] = x.to(dtype)
    return spec.records(given, dims, heads, slice(0, heads), torch.device(device))


def poison_state(state: LayerState) -> None:
    """NaN wherever nothing is stored: what an unused slot holds must not matter."""
    for slab in state.pool:
        slab.fill_(255)
    for window in (state.sink_k, state.sink_v, state.tail_k, state.tail_v):
        window.fill_(float("nan"))


def copy_state(source: LayerState, target: LayerState) -> None:
    """Everything but the addresses."""
    for a, b in zip(source.pool, target.pool, strict=True):
        b.copy_(a)
    for name in ("page_table", "sink_k", "sink_v", "tail_k", "tail_v", "length", "paged", "lost"):
        getattr(target, name).copy_(getattr(source, name))


def filled(case: Case, gen: torch.Generator, device: str) -> tuple[PagedStore, PagedStore]:
    """The state before the step, on the CPU and on `device`, filled by the reference in two ragged chunks."""
    store, other = store_for(case, "cpu"), store_for(case, device)
    lengths = torch.tensor(case.lengths)
    if lengths.max() > 0:
        first = lengths // 2
        for rows in (first, lengths - first):
            chunk = int(rows.max())
            k, v = random_tokens(case, chunk, gen)
            reference.OPERATIONS.append(StepInputs(None, k, v, random_mask(rows, chunk, gen)), store)
    copy_state(store.state, other.state)
    return store, other


@dataclasses.dataclass
class Step:
    """Inputs of one step, on one device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    scaling: float

    def inputs(self, case: Case) -> StepInputs:
        return StepInputs(self.q, self.k, self.v, self.mask, self.scaling, case.softcap, self.sinks)

    def to(self, device: str) -> Step:
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **moved)

    def float(self) -> Step:
        return dataclasses.replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float())


def random_step(case: Case, gen: torch.Generator) -> Step:
    k, v = random_tokens(case, case.tokens, gen)
    q = torch.randn(len(case.lengths), case.tokens, case.heads * case.groups, case.head_dim, generator=gen)
    if case.outliers:
        q[:, :, 1::2, :2] *= 2.0**-10  # a head that only outliers decide, and one that hardly attends to them
    if case.spread is not None:
        spread_queries(case, q)
    q = (q / case.key_size).to(case.dtype).transpose(1, 2)
    mask = None
    if case.padded:
        real = torch.randint(0, case.tokens + 1, (len(case.lengths),), generator=gen)
        real[0] = case.tokens // 2
        mask = random_mask(real, case.tokens, gen)
        for x in (k, v):
            x.masked_fill_(~mask[:, None, :, None], float("nan"))
    sinks = torch.randn(case.heads * case.groups, generator=gen).to(case.dtype) if case.sinks else None
    return Step(q, k, v, mask, sinks, case.head_dim**-0.5)


def dense_view(step: Step, state: LayerState, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values `[B, H, n, D]` that the step attends to, stored ones dequantized; which, bool `[B, 1, S, n]`."""
    total = max(case.lengths)
    keys, values = reference.OPERATIONS.read(PagedStore.over(state, case.spec), total)
    tokens = case.tokens
    valid = torch.arange(total)[None, None, :] < state.length[:, :1, None].cpu()
    valid = valid.expand(-1, tokens, -1)
    chunk = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(len(valid), -1, -1)
    if step.mask is not None:
        chunk = chunk & step.mask[:, None].cpu()
    valid = torch.cat([valid, chunk], -1)[:, None].to(step.q.device)
    k, v = (torch.cat([a, b.nan_to_num()], dim=2) for a, b in ((keys, step.k), (values, step.v)))
    return k, v, valid


def put_heavy_sink(step: Step, stores: tuple[PagedStore, PagedStore], case: Case) -> None:
    """Have the first token of each row score highest in the last query of each KV head's first query head."""
    assert case.heavy_sink is not None
    k, _, valid = (x.cpu() for x in dense_view(step, stores[0].state, case))
    q = step.q[:, :: case.groups, -1].float()
    scores = (k.float() @ q[..., None])[..., 0] * step.scaling
    total = scores.masked_fill(~valid[:, :, -1], float("-inf")).logsumexp(-1, keepdim=True)
    key = q / (q.square().sum(-1, keepdim=True) * step.scaling) * (total + case.heavy_sink)
    for store in stores:
        store.state.sink_k[:, :, 0] = key.to(case.dtype)
        store.state.sink_v[:, :, 0] = 0


def plain(step: Step, state: LayerState, case: Case, score_bias: torch.Tensor | None = None) -> torch.Tensor:
    """The step in the model's dtype over tensors dequantized to that dtype, as eager attention computes it. score_bias: see
    `StepInputs`."""
    k, v, valid = dense_view(step, state, case)
    out = reference.plain_attention(step.q, k, v, valid, step.scaling, case.softcap, step.sinks, score_bias)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def rounding_bound(step: Step, state: LayerState, case: Case) -> torch.Tensor:
    """What outputs `[B, S, Hq, D]` may be off by, each number, if 16-bit operands are rounded; for plain scores.

    Terms q x zero may be as large as q times the largest key of their group (a token, or a channel of a row), and terms
    q x scale x code twice as large, while they all but cancel in a score. Half a unit in the last place of each makes
    delta = 1.5 * 2^-10 sum |q| max |k|, which a score may be off by, and a weight p
    by at most p (e^(delta + that of the sum of weights) - 1), and by 1. Values cancel likewise, to 2^-10 of the largest of
    their group, which counts as much as the weights of its tokens do. Weights and values of bfloat16 are rounded to 8 bits.
    """
    assert case.softcap is None
    assert step.sinks is None
    k, v, valid = dense_view(step, state, case)
    real = valid.any(2)[..., None]
    k, v = (x.double().masked_fill(~real, 0.0).repeat_interleave(case.groups, 1) for x in (k, v))
    q = step.q.double() * step.scaling
    p = (q @ k.transpose(-1, -2)).masked_fill(~valid, float("-inf")).softmax(-1).nan_to_num(0.0)
    key_format, value_format = case.spec.formats
    axis = -1 if key_format.tokenwise else -2
    delta = (
        1.5 * 2.0**-10 * (q.abs() @ k.abs().amax(axis, keepdim=True).expand_as(k).transpose(-1, -2)).clamp(max=2.0**14)
    )
    moved = torch.expm1((delta + (p * delta.exp()).sum(-1, keepdim=True).log()).clamp(max=50.0))
    moved = torch.minimum(p * moved, valid.double())
    slack = moved @ v.abs() + moved.sum(-1, keepdim=True) * (p @ v).abs()
    slack = slack + 2.0 ** (-7 if case.dtype == torch.bfloat16 else -10) * (p @ v.abs())
    cancelled = v.abs().amax(-1 if value_format.tokenwise else -2, keepdim=True).expand_as(v)
    smallest = 2.0**-24  # of float16
    return (slack + 2.0**-10 * (p @ cancelled) + smallest).transpose(1, 2)


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    x, exact = x.cpu().double(), exact.cpu().double()
    return ((x - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def real_queries(x: torch.Tensor, step: Step) -> torch.Tensor:
    """Outputs `[B, S, Hq, D]` of tokens that are no padding."""
    return x if step.mask is None else x[step.mask.to(x.device)]


def assert_same_state(a: LayerState, b: LayerState) -> None:
    """Every byte, also of what is not in use (writes must not stray)."""
    for name in ("length", "paged", "lost"):
        assert torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()), name
    for i, (x, y) in enumerate(zip(a.pool, b.pool, strict=True)):
        different = (x.cpu() != y.cpu()).nonzero()
        assert not len(different), f"pool[{i}]: {len(different)} bytes differ, first at {different[0].tolist()}"
    for name in ("sink_k", "sink_v", "tail_k", "tail_v"):
        x, y = getattr(a, name).cpu(), getattr(b, name).cpu()
        assert torch.equal(x.nan_to_num(nan=1234.0), y.nan_to_num(nan=1234.0)), name


def random_steps(case: Case, steps: int, gen: torch.Generator) -> list[Step]:
    """One token per row each; where `padded`, some rows get none now and then."""
    found = []
    for _ in range(steps):
        step = random_step(dataclasses.replace(case, padded=False), gen)
        if case.padded:
            step.mask = torch.rand(len(case.lengths), 1, generator=gen) < 0.7
            for x in (step.k, step.v):
                x.masked_fill_(~step.mask[:, None, :, None], float("nan"))
        found.append(step)
    return found


def separate_step(module, case: Case, step: Step, store: PagedStore) -> torch.Tensor:
    """The output; attention and storing one after the other. `module`: `reference`, or another with `OPERATIONS`."""
    out = module.OPERATIONS.attend(step.inputs(case), store)
    module.OPERATIONS.append(step.inputs(case)._replace(q=None), store)
    return out


def fused_step(launch, case: Case, step: Step, store: PagedStore) -> torch.Tensor:
    """The output; both at once, and really so (unless tokens go straight into pages)."""
    before = dict(launch.launches)
    out = launch.OPERATIONS.step(step.inputs(case), store)
    launched = {name: count - before.get(name, 0) for name, count in launch.launches.items()}
    assert launched.pop("attend_kernel") == 1
    for name in ("transform_kernel", "project_kernel"):
        assert not launched.pop(name, 0) or case.transform or case.value_transform
    assert launched.pop("append_one_kernel", 0) == int(case.spec.direct)
    assert not any(launched.values()), f"not in one launch: {launched}"
    return out


def check_steps(launch, case: Case, steps: int, seed: int, device: str, run=fused_step, twin: bool = True) -> None:
    """Many steps, queued one after the other: every byte is compared with the reference. Outputs are compared with those of
    attention and storing in launches of their own, or, without a `twin`, with the reference's in float32: the emulator would
    have to build those kernels, too. run: like `fused_step`."""
    gen = generator(case, seed)
    ref, dev = filled(case, gen, device)
    if case.capacity is None:
        for store in (ref, dev):
            store.reserve(max(case.lengths) + steps)
    other = copy.deepcopy(dev) if twin else None
    inputs = random_steps(case, steps, gen)
    here = [step.to(device) for step in inputs]
    outs = [run(launch, case, step, dev) for step in here]
    allowed = 1e-3 if twin else 2 * torch.finfo(case.dtype).eps
    for i, (step, moved, out) in enumerate(zip(inputs, here, outs, strict=True)):
        if other is not None:
            expected = separate_step(launch, case, moved, other)
        else:
            expected = reference.OPERATIONS.attend(step.float().inputs(case), ref)
        expected = real_queries(expected, moved)
        error = relative_error(real_queries(out, moved), expected) if expected.numel() else 0.0
        assert error < allowed, f"step {i}: {error}"
        reference.OPERATIONS.append(StepInputs(None, step.k, step.v, step.mask), ref)
    assert_same_state(ref.state, dev.state)
    if other is not None:
        assert_same_state(ref.state, other.state)
    assert not dev.state.scratch.any(), "counters are not as they were found"


# ---- keys and values whose scales differ by twelve orders of magnitude ----------------------------------------------


#: what fp16 has of scales: from its smallest number to a third of its largest
SMALLEST, LARGEST = 2.0**-24, 2.0**14
#: queries of cases with `spread` ask for so much of a channel, at most
MOST_ASKED = 2.0**8


def spread_scales(case) -> torch.Tensor:
    """`[D]`: each key channel's scale where keys are spread by channel; the same for every chunk."""
    gen = torch.Generator().manual_seed(case.head_dim)
    return SMALLEST * (LARGEST / SMALLEST) ** torch.rand(case.head_dim, generator=gen)


def put_spread(case, k: torch.Tensor, v: torch.Tensor, gen: torch.Generator) -> None:
    """Overwrite `spread` keys or values `[B, H, S, D]`; of two tokens' values one has a mean of 1."""
    size = SMALLEST * (LARGEST / SMALLEST) ** torch.rand(*v.shape[:3], 1, generator=gen)
    side = v if case.spread == "values" else k
    noise = 2 * torch.rand(side.shape, generator=gen) - 1
    key_format, value_format = case.spec.formats
    if case.spread == "keys":
        k.copy_(noise * (size if key_format.tokenwise else spread_scales(case)))
        return
    if not value_format.tokenwise:
        size = spread_scales(dataclasses.replace(case, head_dim=v.shape[-1])).expand_as(v)
    mean = torch.rand(*v.shape[:3], 1, generator=gen).round()
    v.copy_(mean + noise * size)
    if value_format.tokenwise:
        k.mul_(2.0**-4)
        k[..., 0] = size[..., 0].log() / 8


def spread_queries(case, q: torch.Tensor) -> None:
    """What of queries `[B, S, Hq, D]` goes with `put_spread`."""
    key_format, value_format = case.spec.formats
    if case.spread == "keys":
        q.mul_(LARGEST**-1 if key_format.tokenwise else (1 / spread_scales(case)).clamp(max=MOST_ASKED))
    elif value_format.tokenwise:  # weights are scales to the power of 0, -1/4, -1/2, ...
        powers = torch.arange(q.shape[2]) % case.groups / 4
        q[..., 0] = -8 * case.head_dim**0.5 * powers
