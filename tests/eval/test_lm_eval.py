"""The model type `hf-lowbit` in lm-eval. The command and the offline tasks: `test_lm_eval_run`."""

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from transformers import PreTrainedTokenizerFast

import hf_lowbit_kv as lb

# importing lm-eval and what it needs warns about itself
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

huggingface = pytest.importorskip("lm_eval.models.huggingface")
from lm_eval.api.instance import Instance  # noqa: E402

from hf_lowbit_kv.eval.lm_eval_model import LowBitLM  # noqa: E402


def lm_of(model_folder, preset="kivi-2", batch_size=8, **options):
    options = {"device": "cpu", "dtype": torch.float32, "kv_chunk": 32} | options
    overrides = {} if preset == "full" else SMALL_PAGES
    return LowBitLM(str(model_folder), preset=preset, batch_size=batch_size, **options, **overrides)


def requests(kind="loglikelihood", tokens=150):
    """Six contexts of numbers with a common beginning, three continuations each."""
    prefix = " ".join(str(3 + i * i % 97) for i in range(tokens))
    if kind == "generate_until":
        arguments = {"until": ["zzz"], "max_gen_toks": 12, "do_sample": False}
        contexts = [f"{prefix} {' '.join(['5'] * (1 + i))}" for i in range(3)]
        return [Instance(kind, {}, (context, arguments), 0, metadata=("writing", 0, 1)) for context in contexts]
    return [
        Instance(
            kind, {}, (f"{prefix} {5 + i} {' '.join(['6'] * i)}".strip(), f" {ending}"), 0, metadata=("numbers", i, 1)
        )
        for i in range(6)
        for ending in ("7 8", "9", "90 91 92")
    ]


def logprobs(lm, tokens=150):
    return [answer[0] for answer in lm.loglikelihood(requests(tokens=tokens), disable_tqdm=True)]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("preset", ["dense", "full"])
def test_full_precision_agrees_with_lm_evals_own_model(model_folder, preset, batch_size):
    plain = huggingface.HFLM(str(model_folder), device="cpu", dtype=torch.float32, batch_size=4)
    expected = plain.loglikelihood(requests(), disable_tqdm=True)
    lm = lm_of(model_folder, preset, batch_size)
    found = lm.loglikelihood(requests(), disable_tqdm=True)
    assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
    assert [answer[1] for answer in found] == [answer[1] for answer in expected]
    assert lm.packed_share == {"numbers": None}  # nothing is to be packed


@pytest.mark.parametrize(("preset", "bound"), [("full", 1e-9), ("dense", 5e-6)])
def test_chunks_and_shared_contexts_change_nothing_but_rounding(model_folder, preset, bound):
    """In float64 they agree to 13 digits with one pass over each text. `dense` keeps float64 too, but attends in float32."""
    plain = huggingface.HFLM(str(model_folder), device="cpu", dtype=torch.float64, batch_size=4)
    expected = [answer[0] for answer in plain.loglikelihood(requests(), disable_tqdm=True)]
    for batch_size in (1, 8):
        assert logprobs(lm_of(model_folder, preset, batch_size, dtype=torch.float64)) == pytest.approx(
            expected, abs=bound
        )


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["dense", "kivi-2"])
def test_gpu_agrees_with_cpu(model_folder, preset):
    found = [logprobs(lm_of(model_folder, preset, device=device)) for device in ("cuda", "cpu")]
    assert found[0] == pytest.approx(found[1], abs=1e-4 if preset == "dense" else 0.05)


def test_rolling_agrees_with_lm_evals_own_model(model_folder):
    text = " ".join(str(3 + i * i % 97) for i in range(200))
    instance = [Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("numbers", 0, 1))]
    plain = huggingface.HFLM(str(model_folder), device="cpu", dtype=torch.float32, max_length=128)
    expected = plain.loglikelihood_rolling(instance, disable_tqdm=True)
    found = lm_of(model_folder, "dense", max_length=128).loglikelihood_rolling(instance, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)


def test_generation_uses_a_fresh_cache_for_each_batch(model_folder):
    lm = lm_of(model_folder, "kivi-2", batch_size=2)
    batch = requests("generate_until")
    written = lm.generate_until(batch, disable_tqdm=True)
    for request, text in zip(batch, written, strict=True):
        ids = lm.tokenizer(request.args[0], return_tensors="pt").input_ids
        cache = lb.from_preset("kivi-2", lm.model, **SMALL_PAGES)
        own = lm.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=159)
        assert text == lm.tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True)
        assert int(cache.layers[0].store.state.paged[0, 0]) == (ids.shape[1] + 11 - 32) // 32 * 32
    # each prompt is read whole and exactly; what is written after it reads 96 or 128 packed tokens
    assert 0.5 < lm.packed_share["writing"] < 0.85


def test_prompts_can_be_read_in_chunks(model_folder):
    lm = lm_of(model_folder, "kivi-2")
    (request,) = requests("generate_until")[:1]
    request.args[1].update(max_gen_toks=1, prefill_chunk_size=50)
    lm.generate_until([request], disable_tqdm=True)
    # 151 tokens: the last pass reads one, after 150, of which (150 - 32) // 32 * 32 are in pages
    assert lm.packed_share["writing"] == pytest.approx(96 / 151)
    request.args[1].update(prefill_chunk_size=None)
    with pytest.raises(ValueError, match="packed_share=0 for writing"):
        lm_of(model_folder, "kivi-2").generate_until([request], disable_tqdm=True)


def test_presets_change_on_one_model(model_folder):
    lm = lm_of(model_folder)
    packed = logprobs(lm)
    assert lm.packed_share["numbers"] > 0.5
    lm.use("full")
    full = logprobs(lm)
    lm.use("kivi-2", **SMALL_PAGES)
    assert logprobs(lm) == packed != full
    info = lm.get_model_info()
    assert (info["preset"], info["kv_chunk"]) == ("kivi-2", 32)
    assert info["packed_share"] == lm.packed_share
    with pytest.raises(ValueError, match="preset='kivi-3' is not known"):
        lm.use("kivi-3")
    assert lm.preset == "kivi-2"


def test_a_calibration_is_a_model_argument(model_folder, tmp_path):
    """`--model_args preset=eigen-2,calibration=FILE`, as text, the way lm-eval hands it on."""
    model, tokenizer = tiny_models("llama")[0], PreTrainedTokenizerFast.from_pretrained(model_folder)
    text = " ".join(str(3 + i * i % 97) for i in range(2100))
    path = tmp_path / "eigen.safetensors"
    lb.calibrate(model, tokenizer, [text], "eigen-2", samples=8, length=256, gradients=False, attention=False).save(
        path
    )
    choices = "kv_chunk=32,page_size=32,residual=32,dtype=float32"
    arguments = f"pretrained={model_folder},preset=eigen-2,calibration={path},{choices}"
    lm = LowBitLM.create_from_arg_string(arguments, {"device": "cpu", "batch_size": 8})
    found = logprobs(lm)
    assert lm.packed_share["numbers"] > 0.4
    lm.use("full")
    assert found != logprobs(lm)
    with pytest.raises(ValueError, match=r"hf-lowbit-kv calibrate .*--preset eigen-2"):
        lm_of(model_folder, "eigen-2")
    with pytest.raises(OSError, match="missing"):
        lm_of(model_folder, "eigen-2", calibration=str(tmp_path / "missing.safetensors"))


def test_nothing_packed_is_an_error(model_folder):
    with pytest.raises(
        ValueError, match=r"packed_share=0 for numbers.*packs its first page at 64 tokens.*allow_unpacked=True"
    ):
        logprobs(lm_of(model_folder), tokens=20)
    lm = lm_of(model_folder, allow_unpacked=True)
    logprobs(lm, tokens=20)
    assert lm.packed_share == {"numbers": 0}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (("5 6", ""), r"an item has no token in its answer, so it has no score: \('5 6', ''\)"),
        (("5 6", " 7" * 70), "an item's answer has 70 tokens, and the model reads 64"),
    ],
    ids=["no answer", "long answer"],
)
def test_items_without_a_score_are_named(model_folder, item, message):
    """lm-eval has assertions without a message."""
    lm = lm_of(model_folder, max_length=64, allow_unpacked=True)
    with pytest.raises(ValueError, match=message):
        lm.loglikelihood([Instance("loglikelihood", {}, item, 0, metadata=("numbers", 0, 1))], disable_tqdm=True)
