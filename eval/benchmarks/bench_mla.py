"""Decode steps with latents, in FP8 (`snapmla`) or in 16 bits (`mla`): `python -m hf_lowbit_kv.eval.benchmarks.bench_mla`.

`layer`: decode attention of a layer, compared with 16-bit MLA. A case is checked before it is timed. It is not timed if
its output differs from float32 attention over the same packed bytes by more than a bound, or if stored bytes differ
from the reference's. Kernels and peers are timed in the same rounds. A peer attends to the latent in bfloat16, in
absorbed form: PyTorch's matmul and softmax, and FlashInfer's MLA decode if it is installed.

- `ms`: one layer's attention to all stored tokens and to the new token. `step_ms`: the same, and storing the token.
- `ratio`: time of the fastest peer divided by ours. `byte_limit_ratio`: `ratio` of a kernel that only reads the packed
  bytes, at the bandwidth measured in the same run.
- `relerr`: relative error, compared with float32 attention over the same packed bytes. Kernels that quantize queries
  and weights (`kernel`: `latent_wide_attend`) may have twice the error of the same pipeline in PyTorch
  (`snapmla_pipeline`).
- `convert`: whether the GPU's instruction converts e4m3.

`step`: a decode step of a model with the shape of DeepSeek-V2-Lite and random weights. All caches are filled with the
same random latents, because the numbers do not change the time. Times are medians over `steps` steps.

- `stock`: `DynamicCache` under SDPA. Every step expands its history to keys and values.
- `snapmla`: a preallocated `MLAFP8Cache`.
- `recorded`: the step of `snapmla` as one CUDA graph.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import AutoConfig, DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.backends.choice import BACKENDS, LayerSetup, storage_spec
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks import snapmla_pipeline
from hf_lowbit_kv.eval.benchmarks.packed_layer import WrongResultError, check_error
from hf_lowbit_kv.eval.benchmarks.random_models import clean, random_model
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Layers, Out, Rounds, Rows, Run
from hf_lowbit_kv.eval.benchmarks.timing import Candidate, read_bandwidth, sets_needed, time_interleaved
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import Operations, StepInputs

RANK, ROPE = 512, 64
#: rows, and tokens of each row
SHAPES = {"32x8k": (32, 8192), "8x32k": (8, 32768), "1x128k": (1, 131072)}
HEADS = (16, 64, 128)
PRESETS = ("snapmla", "mla")
SCALING = (128 + 64) ** -0.5
#: largest allowed relative error of the output: two roundings of bfloat16, and that of the pipeline that quantizes more
BOUND = 2 * 2.0**-8


class LatentCase(NamedTuple):
    """One layer. `kv` `[B, L, RANK + ROPE]` has the packed tokens of the store, in bfloat16."""

    q: torch.Tensor
    kv: torch.Tensor
    store: PagedStore
    k: torch.Tensor
    v: torch.Tensor

    def attend(self, kernels: Operations) -> torch.Tensor:
        return kernels.attend(self.inputs, self.store)

    def step(self, kernels: Operations) -> torch.Tensor:
        return kernels.step(self.inputs, self.store)

    @property
    def inputs(self) -> StepInputs:
        return StepInputs(self.q, self.k, self.v, scaling=SCALING)


def build(
    kernels: Operations, spec: LayerSpec, batch: int, length: int, heads: int, device: torch.device, seed: int
) -> LatentCase:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    kv = random(batch, length, RANK + ROPE)
    store = PagedStore(spec, batch, 1, RANK, ROPE, torch.bfloat16, device, length + 2 * spec.page_size)
    kernels.append(StepInputs(None, kv[:, None, :, :RANK], kv[:, None, :, RANK:]), store)
    q = random(batch, heads, 1, RANK + ROPE)
    return LatentCase(q, kv, store, random(batch, 1, 1, RANK), random(batch, 1, 1, ROPE))


def check(kernels: Operations, case: LatentCase) -> float:
    """The output's relative error on the first row. Raises `WrongResultError` if a check fails."""
    row, spec = case.store.rows(slice(1)), case.store.spec
    inputs = case.inputs.rows(slice(1))
    expected = reference.OPERATIONS.attend(inputs._replace(q=inputs.queries.float()), row)
    output = case.attend(kernels)[:1].float()
    error, bound = float((output - expected).norm() / expected.norm()), BOUND
    if kernel_of(case) == "latent_wide_attend":
        pipeline = snapmla_pipeline.attend(inputs, row)
        bound += 2 * float((pipeline - expected).norm() / expected.norm())
    check_error(error, bound)
    c, r = reference.OPERATIONS.read(row, 256)
    twin = PagedStore(spec, 1, 1, RANK, ROPE, torch.bfloat16, c.device, 256)
    reference.OPERATIONS.append(StepInputs(None, case.kv[:1, None, :256, :RANK], case.kv[:1, None, :256, RANK:]), twin)
    if not all(torch.equal(x, y) for x, y in zip((c, r), reference.OPERATIONS.read(twin, 256))):
        raise WrongResultError("stored bytes are not the reference's")
    return error


def kernel_of(case: LatentCase) -> str:
    """The name of the kernel that attends."""
    from hf_lowbit_kv.triton_kernels.cuda import latent

    rows, device = case.q.shape[1] * case.q.shape[2], case.q.device
    return latent.plan(case.store.spec, RANK, ROPE, case.q.dtype, rows, device).kernel


def matmul_peer(case: LatentCase) -> Callable[[], torch.Tensor]:
    q, keys, values = case.q[:, :, 0], case.kv.transpose(1, 2), case.kv[..., :RANK]

    def attend() -> torch.Tensor:
        weights = torch.softmax(torch.bmm(q, keys) * SCALING, -1, dtype=torch.float32)
        return torch.bmm(weights.to(q.dtype), values)

    return attend


def flashinfer_peer(case: LatentCase, backend: str) -> Callable[[], torch.Tensor]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, length, _ = case.kv.shape
    device, heads, page = case.q.device, case.q.shape[1], 64
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(2**27, dtype=torch.uint8, device=device), backend=backend)
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    pages = torch.arange(batch * length // page, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    dtypes = case.q.dtype, case.kv.dtype
    wrapper.plan(rows, rows * (length // page), pages, lengths, heads, RANK, ROPE, page, False, SCALING, *dtypes)
    q = case.q[:, :, 0]
    paged = case.kv.reshape(-1, page, RANK + ROPE)
    split = [x.contiguous() for x in (q[..., :RANK], q[..., RANK:], paged[..., :RANK], paged[..., RANK:])]
    return lambda: wrapper.run(*split)


def peers(case: LatentCase) -> dict[str, Callable[[], torch.Tensor]]:
    calls = {"torch-matmul": matmul_peer(case)}
    if importlib.util.find_spec("flashinfer") is not None:
        calls |= {f"flashinfer-{name}": flashinfer_peer(case, name) for name in ("fa2", "fa3")}
    return calls


def measure(
    kernels: Operations, preset: str, shape: str, heads: int, bandwidth: float, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Measure one case. Returns a record without provenance."""
    batch, length = SHAPES[shape]
    spec = storage_spec(get_preset(preset).spec(), "cuda")
    cases = [build(kernels, spec, batch, length, heads, device, 0)]
    nbytes = batch * length * int(cases[0].store.token_bytes)
    cases += [build(kernels, spec, batch, length, heads, device, n) for n in range(1, sets_needed(nbytes, device, 4))]
    error = check(kernels, cases[0])
    candidates = [Candidate("ours", [lambda case=case: case.attend(kernels) for case in cases])]
    candidates += [Candidate(name, [call]) for name, call in peers(cases[0]).items()]
    lengths = [(case.store.state.length.clone(), case.store.state) for case in cases]

    def rewind() -> None:
        for tokens, state in lengths:
            state.length.copy_(tokens)
            state.paged.copy_(tokens)

    candidates.append(Candidate("step", [lambda case=case: case.step(kernels) for case in cases], before=rewind))
    times = time_interleaved(candidates, device, rounds)
    ms, step_ms = times.pop("ours"), times.pop("step")
    peer = min(times, key=times.__getitem__)
    return {
        "preset": preset,
        "shape": shape,
        "heads": heads,
        "rank": RANK,
        "rope": ROPE,
        "ms": ms,
        "step_ms": step_ms,
        "peer": peer,
        "peer_ms": times[peer],
        "ratio": times[peer] / ms,
        "byte_limit_ratio": times[peer] * 1e-3 * bandwidth / nbytes,
        "peers_ms": times,
        "bytes": nbytes,
        "token_bytes": cases[0].store.token_bytes,
        "bandwidth": bandwidth,
        "bandwidth_used": nbytes / (ms * 1e-3) / bandwidth,
        "relerr": error,
        "kernel": kernel_of(cases[0]),
        "dtype": "bfloat16",
    }


def time_layers(
    shape: Annotated[list[str], typer.Option(help=f"Of {', '.join(SHAPES)}.")] = list(SHAPES),  # noqa: B006
    heads: Annotated[list[int], typer.Option(help="Query heads.")] = list(HEADS),  # noqa: B006
    preset: Annotated[list[str], typer.Option(help=f"Of {', '.join(PRESETS)}.")] = ["snapmla"],  # noqa: B006
    rounds: Rounds = 10,
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Check and time decode attention to latents on this GPU."""
    if unknown := [name for name in preset if name not in PRESETS]:
        raise typer.BadParameter(f"preset={unknown[0]!r} does not store latents; allowed: {', '.join(PRESETS)}")
    device = gpu()
    if reason := BACKENDS["cuda"].why_not(LayerSetup(device, torch.bfloat16)):
        raise typer.BadParameter(f"backend='cuda' {reason}")
    from hf_lowbit_kv.triton_kernels.cuda import latent

    run = Run("mla", str(device), commit, out)
    bandwidth = read_bandwidth(device)
    for each, name, count in itertools.product(preset, shape, heads):
        record = measure(latent.OPERATIONS, each, name, count, bandwidth, device, rounds)
        run.add(record | {"convert": latent.converts(device)})
        clean(device)
    times = "ms:.4f", "step_ms:.4f", "peer", "peer_ms:.4f", "ratio:.2f", "byte_limit_ratio:.2f", "bandwidth_used:.2f"
    run.end("preset", "shape", "heads", "kernel", *times, "relerr:.1e")


def gpu() -> torch.device:
    """The first GPU. Raises `typer.BadParameter` if there is none."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("it needs a GPU, and there is none")
    return torch.device("cuda", 0)


# ---- step -------------------------------------------------------------------------------------------------------------

#: DeepSeek-V2-Lite (its published configuration)
V2_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


def build_model(layers: int, device: torch.device) -> Any:
    """The model with random weights in bfloat16."""
    config = AutoConfig.for_model("deepseek_v2", **V2_LITE | {"num_hidden_layers": layers})
    return random_model(config, torch.bfloat16, device)


def latents(batch: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    c, r = (torch.randn(batch, 1, tokens, width, dtype=torch.bfloat16, device=device) for width in (RANK, ROPE))
    return c, r


def fill_packed(cache: Any, batch: int, tokens: int, device: torch.device) -> None:
    """Put random latents into every layer, stored by the kernels as they store a prompt."""
    for layer in cache.packed_layers:
        c, r = latents(batch, tokens, device)
        layer.lazy_initialization(c, r)
        ops.append(StepInputs(None, c, r), layer.store, layer.backend)
        layer.facts.mode = "packed"
        layer.length.set(tokens)


def step_ms(model: Any, cache: Any, batch: int, tokens: int, steps: int, graph: bool) -> float:
    """Median milliseconds of steps that decode one token of every row. graph: the step as one CUDA graph."""
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    position = torch.full((batch, 1), tokens, device=model.device)

    def step() -> None:
        model(token, position_ids=position, **as_argument(cache), use_cache=True)
        position.add_(1)

    # with `before`, a sample is one call: each step stores a token, and the cache has room for few
    candidate = Candidate("step", [step], graph, before=lambda: None)
    return time_interleaved([candidate], model.device, steps)["step"]


def time_ours(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    model.set_attn_implementation(lb.ATTENTION_NAME)
    cache = lb.MLAFP8Cache(model, max_cache_len=tokens + 3 * steps + 16)
    fill_packed(cache, batch, tokens, model.device)
    out = {"snapmla_bytes": int(cache.nbytes), "token_bytes": cache.packed_layers[0].store.token_bytes}  # type: ignore[union-attr]
    times = (step_ms(model, cache, batch, tokens, steps, graph) for graph in (False, True))
    return out | dict(zip(("snapmla_ms", "recorded_ms"), times, strict=True))


def time_stock(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    model.set_attn_implementation("sdpa")
    cache: Any = DynamicCache(config=model.config)
    for index in range(model.config.num_hidden_layers):
        cache.update(*latents(batch, tokens, model.device), index)
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"stock_ms": step_ms(model, cache, batch, tokens, steps, False), "stock_bytes": nbytes}


@torch.inference_mode()
def measure_step(model: Any, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Measure the steps. Returns a record without provenance."""
    out: dict[str, Any] = {"batch": batch, "tokens": tokens, "layers": model.config.num_hidden_layers}
    out |= time_ours(model, batch, tokens, steps)
    clean(model.device)
    out |= time_stock(model, batch, tokens, max(steps // 3, 3))
    return out | {"ratio": out["stock_ms"] / out["recorded_ms"]}


def time_model(
    batch: Rows = 8,
    tokens: Annotated[int, typer.Option(min=1)] = 32768,
    layers: Layers = 27,
    steps: Annotated[int, typer.Option(min=3)] = 20,
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Time a decode step of a DeepSeek-V2-Lite-shaped model on this GPU."""
    device = gpu()
    run = Run("mla-step", str(device), commit, out)
    run.add(measure_step(build_model(layers, device), batch, tokens, steps))
    sizes = "stock_bytes:GB", "snapmla_bytes:GB"
    run.end("stock_ms:.2f", "snapmla_ms:.2f", "recorded_ms:.2f", "ratio:.2f", *sizes)


if __name__ == "__main__":
    run_command(layer=time_layers, step=time_model)
