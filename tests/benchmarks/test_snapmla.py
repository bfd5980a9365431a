"""SnapMLA: the FP8 format, the pipeline with quantized queries and weights, and what both do to a trained MLA model.

`layer_errors` takes the latents of a text and the queries of its last tokens from every layer of the model, and compares
attention over quantized latents with attention over exact ones (SnapMLA, table 2 and figure 4). The error is only that of
the stored latents: queries, weights and sums are exact; `pipeline` adds SnapMLA's quantized queries and weights.

- `rmse`, `cosine` (1 - cosine similarity), `l2` (relative): of the output of attention before `o_proj`, means over queries.
- `perplexity`: per byte, of the tokens after the first chunk.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks import snapmla_pipeline
from hf_lowbit_kv.formats import Fp8, parse_format
from hf_lowbit_kv.formats.fp8 import scale_of, to_e4m3

#: a small trained model; its tokens are bytes
MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny_mla"


def read_bytes(path: Path, tokens: int) -> torch.Tensor:
    """int64 `[tokens]`: the bytes of a text."""
    return torch.frombuffer(bytearray(path.read_bytes()[:tokens]), dtype=torch.uint8).long()


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, cache: Any, chunk: int = 64) -> float:
    """Per token, of `ids` `[tokens]` read in chunks with that cache; the first chunk does not count."""
    loss, count, last = 0.0, 0, None
    for part in ids.to(model.device)[None].split(chunk, 1):
        logits = model(part, **as_argument(cache)).logits[0].float()
        if last is not None:
            predicted = torch.log_softmax(torch.cat([last[None], logits[:-1]]), -1)
            loss -= float(predicted.gather(1, part[0, :, None]).sum())
            count += part.shape[1]
        last = logits[-1]
    return math.exp(loss / count)


SEED = 0


def random(*shape: int, seed: int = SEED) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- format ---------------------------------------------------------------------------------------------------------


def test_e4m3_is_the_nearest_number():
    """All 253 numbers of e4m3, from their definition, and what lies between them."""
    numbers = sorted({(-1) ** s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
                      for s in (0, 1) for e in range(16) for m in range(8) if (e, m) != (15, 7)})  # fmt: skip
    assert (len(numbers), numbers[-1]) == (253, 448.0)
    table = torch.tensor(numbers, dtype=torch.float64)
    x = torch.cat([random(4000) * 100, random(4000) * 0.01, table.float(), torch.tensor([449.0, -1e9])])
    found = to_e4m3(x).double()
    nearest = (x.double()[:, None] - table).abs().amin(1)
    assert torch.equal((found - x.double()).abs(), nearest)


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "fp8-static"])
def test_error_of_a_page(name):
    """A number of 4 significant bits: an error of at most 1/16 of it, or half a step of subnormals times the scale."""
    fmt = parse_format(name)
    assert (fmt.name, fmt.tokenwise) == (name, name != "fp8-block")
    x = random(2, 128, 192) * torch.logspace(-3, 2, 128)[:, None]
    found = fmt.decode(fmt.encode(x), 192, 128, x.dtype)
    scale = {"fp8": x.abs().amax(-1, keepdim=True) / 448, "fp8-static": torch.tensor(1.0)}.get(name)
    if scale is None:
        blocks = x.unflatten(-1, (3, 64)).unflatten(1, (2, 64)).abs().amax((2, 4))
        scale = blocks.repeat_interleave(64, 1).repeat_interleave(64, 2) / 448
    assert ((found - x).abs() <= torch.maximum(x.abs() / 16, scale * 2**-10) * 1.0001).all()
    assert fmt.bits_per_value(512) == {"fp8": 8 + 32 / 512, "fp8-block": 8 + 32 / 64**2, "fp8-static": 8}[name]


def test_zeros_and_constants():
    for x in (torch.zeros(128, 64), torch.full((128, 64), -3.0)):
        assert torch.equal(Fp8().decode(Fp8().encode(x), 64, 128, x.dtype), x)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_token_with_nan_or_inf(bad):
    """It decodes to NaN, in the same bytes for any sign and payload. Other tokens do not change."""
    x = random(128, 64)
    clean = Fp8().split(Fp8().encode(x), 64, 128, x.dtype)
    x[7, 3], x[9] = bad, bad
    found = Fp8().encode(x)
    arrays, rest = Fp8().split(found, 64, 128, x.dtype), [i for i in range(128) if i not in (7, 9)]
    for name in ("codes", "scale"):
        assert torch.equal(arrays[name][rest].view(torch.uint8), clean[name][rest].view(torch.uint8))
    assert (arrays["codes"][[7, 9]].view(torch.uint8) == 0x7F).all()
    assert (arrays["scale"][[7, 9]].view(torch.int32) == 0x7FC00000).all()
    assert Fp8().decode(found, 64, 128, x.dtype).isnan().all(-1).nonzero().flatten().tolist() == [7, 9]


def test_fp8_through_a_cache():
    from cases import left_padded, tiny_models

    ours, theirs = tiny_models("llama")
    ids, mask = left_padded(2, 60)
    cache = lb.LowBitCache(ours, "fp8", "fp8", page_size=32, residual=0)
    with torch.no_grad():
        for part, padding in zip(ids.split(20, 1), (mask[:, :20], mask[:, :40], mask)):
            found = ours(part, attention_mask=padding, past_key_values=cache).logits
        expected = theirs(ids, attention_mask=mask).logits[:, -20:]
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.1
    assert cache.nbytes.window == 0
    assert cache.spec.key_format.bits_per_value(64) == 8.5


# ---- pipeline -------------------------------------------------------------------------------------------------------


class Latents:
    """rows query rows and n tokens, as FP8 and exactly; jump: factor between the latents of neighbouring blocks."""

    def __init__(self, n: int, rows: int = 8, rank: int = 128, rope: int = 32, jump: float = 1.0, spread: float = 1.0):
        content = random(n, rank, seed=1) * torch.where(torch.arange(n) // 64 % 2 == 1, jump, 1.0)[:, None]
        self.query, self.rope = random(rows, rank + rope, seed=2), random(n, rope, seed=3) * spread
        self.scale = scale_of(content.abs().amax(-1))
        self.codes = to_e4m3(content / self.scale[:, None]).float()
        self.content = self.codes * self.scale[:, None]
        self.scaling = (rank + rope) ** -0.5 / max(jump, spread)

    def exact(self, query: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        query = self.query if query is None else query
        keys = torch.cat([self.content, self.rope], -1).double()
        scores = query.double() @ keys.T * self.scaling
        return torch.softmax(scores, -1) @ self.content.double(), scores.logsumexp(-1)

    def pipeline(self) -> tuple[torch.Tensor, torch.Tensor]:
        return snapmla_pipeline.attention(self.query, self.codes, self.scale, self.rope, self.scaling)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_pipeline_against_exact_attention(n):
    """With the quantized queries, what is left is the rounding of weights: 1/16 of each at most, relative to its block."""
    case = Latents(n)
    q, scale = snapmla_pipeline.quantize_queries(case.query[:, :128])
    quantized = torch.cat([q * scale, case.query[:, 128:]], -1)
    out, lse = case.pipeline()
    expected, expected_lse = case.exact(quantized)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    keys = torch.cat([case.content, case.rope], -1).double()
    weights = torch.softmax(quantized.double() @ keys.T * case.scaling, -1)
    largest = (weights * case.scale).amax(-1, keepdim=True) / case.scale  # a block's scale is at most this
    bound = torch.maximum(weights / 16, largest / 448 * 2**-10) @ case.content.abs().double()
    assert ((out - expected).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize("options", [{"jump": 1e4}, {"jump": 1e-4}, {"spread": 1000.0}], ids=str)
def test_jumps_of_scales_and_wide_rope_parts_lose_nothing(options):
    """The error beside that of an even case: blocks come in order, so no weight is scaled down and up again."""
    even, case = Latents(640), Latents(640, **options)
    error = [((x.pipeline()[0] - x.exact()[0]).norm() / x.exact()[0].norm()) for x in (even, case)]
    assert error[1] < 2 * error[0] + 0.02


def test_latents_of_zeros_are_exact():
    case = Latents(100)
    out, lse = snapmla_pipeline.attention(
        case.query, case.codes * 0, scale_of(torch.zeros(100)), case.rope, case.scaling
    )
    assert torch.equal(out, torch.zeros_like(out))
    expected = (case.query[:, 128:] @ case.rope.T * case.scaling).double().logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=1e-4)


# ---- a trained model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="lowbit_kv").eval()


@pytest.fixture(scope="module")
def text():
    return read_bytes(MODEL / "bible-held-out.txt", 640)


def test_perplexity_is_that_of_the_model(trained, text):
    plain, fp8 = (perplexity(trained, text, lb.from_preset(name, trained)) for name in ("mla", "snapmla"))
    with torch.no_grad():
        logits = trained(text[None]).logits[0, 63:-1]
    expected = math.exp(torch.nn.functional.cross_entropy(logits, text[64:]))
    assert plain == pytest.approx(expected, rel=1e-4)
    assert fp8 == pytest.approx(expected, rel=0.005)
    assert fp8 != plain
    assert expected < 4, "the model has learned something"
