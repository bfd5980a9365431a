"""Fused pieces of a step: found by what modules do, checked before use, and gone afterwards.

Recorded steps with pieces fused are in `test_fusing_gpu.py`. Here steps run eagerly with kernels in Triton's interpreter, in
processes of their own (see `test_kernels`), and recorded with only norms, which need no kernels of ours.
"""

import copy
import threading
from typing import ClassVar

import kernel_checks as kernels
import mla_cases
import peft
import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import FakeGraph
from generation_cases import FUSED, ours
from interpreted import run_part
from torch import nn

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import fusing, recording
from hf_lowbit_kv.generation.fused_pieces import Norm, NotFusedError, Piece, Unfused, with_globals
from hf_lowbit_kv.generation.fusing import Fusion, agreement, errors_of, why_nothing_fused
from hf_lowbit_kv.generation.piece_finder import find_pieces
from hf_lowbit_kv.triton_kernels import common, fused_products

pytestmark = pytest.mark.host

#: with the reasons why others are not fused
FOUND = FUSED | {
    "glm4": "norms 9/9, rotary 0/2 (PAIRS), gate 2/2, products 2/2",
    "cohere": "norms 0/3 (layers.0.input_layernorm and 2 more: no RMS norm), rotary 0/2 (PAIRS), gate 2/2, products 4/4",
    "deepseek_v3": "norms 9/9, rotary 0/2 (PAIRS), gate 2/2, products 4/4",
}
PAIRS = "layers.0.self_attn and 1 more: interleaved RoPE"
#: the others have the pieces of one of these
FAST = ("llama", "phi3", "gemma4_text", "gpt_oss", "mimo_v2_flash", "deepseek_v3", "qwen3_next")


def families(names, fast=FAST):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_finding_pieces_draws_no_random_numbers():
    """Else a recorded call would sample other tokens than the next one."""
    model = tiny_models("llama")[0]
    before = torch.get_rng_state()
    assert list(find_pieces(model))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.begins_first
@pytest.mark.slow
@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the tests themselves run here")
def test_interpreted():
    """For the oldest transformers; on the newest one they run with other files' (`triton/test_interpreted.py`)."""
    run_part([__file__], part=0, parts=1)


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter takes a time of its own for each program."""
    if kernels.INTERPRETED:
        for name in ("ONE_ROW", "MORE_ROWS", "ONE_ROW_GATED", "MORE_ROWS_GATED"):
            monkeypatch.setattr(fused_products, name, fused_products.Tiles(128, 64, 4, 2))


def model_of(family, dtype=torch.float16):
    models = mla_cases.tiny_models if family == "deepseek_v3" else tiny_models
    return models(family)[0].to(dtype)


@pytest.fixture
def model():
    return model_of("llama")


def attributes(model):
    return {name: list(vars(module)) for name, module in model.named_modules()}


class RepeatedStep:
    """A step of one token after 40 tokens of two rows, repeatable."""

    def __init__(self, model):
        self.model = model
        self.cache = lb.from_preset("mla" if model.config.model_type == "deepseek_v3" else "kivi-2", model)
        with torch.no_grad():
            model(left_padded(2, 40)[0], past_key_values=self.cache)

    @torch.no_grad()
    def step(self):
        return self.model(torch.tensor([[5], [7]]), past_key_values=copy.deepcopy(self.cache)).logits

    def settled(self):
        fusion = Fusion()
        while not fusion.settled:
            with fusion.observing(self.model):
                self.step()
        return fusion


@kernels.needs_interpreter
@pytest.mark.parametrize("family", families(FOUND))
def test_small_families(family):
    """The step that is observed is the plain one, the fused one differs by roundings, and nothing stays in the model."""
    model = model_of(family)
    decoder, before = RepeatedStep(model), attributes(model)
    unfused, fusion = decoder.step(), Fusion()
    with fusion.observing(model):
        assert torch.equal(decoder.step(), unfused)
    assert attributes(model) == before
    assert fusion.report() == FOUND[family].replace("PAIRS", PAIRS)
    with fusion.in_force(model):
        fused = decoder.step()
    assert attributes(model) == before
    assert not torch.equal(fused, unfused)
    assert (fused - unfused).norm() < 0.005 * model.config.num_hidden_layers * unfused.norm()
    assert torch.equal(decoder.step(), unfused)


def _is_close_to_float32(family):
    model = model_of(family, torch.bfloat16)
    decoder = RepeatedStep(model)
    fusion, unfused = decoder.settled(), decoder.step()
    with fusion.in_force(model):
        fused = decoder.step()
    exact = RepeatedStep(model.float()).step()
    return [float((x - exact).norm()) for x in (fused, unfused)]


@kernels.needs_interpreter
@pytest.mark.parametrize(
    "family",
    families(["llama", "gemma3_text", "gpt_oss", "gemma4_text", "mimo_v2_flash"], ["gpt_oss", "mimo_v2_flash"]),
)
def test_small_error_is_at_most_twice_the_plain_steps(family, monkeypatch):
    monkeypatch.setattr(lb, "from_preset", lambda preset, model: lb.LowBitCache(model, "dense", "dense"))
    fused, unfused = _is_close_to_float32(family)
    assert fused <= 2 * unfused


@kernels.needs_interpreter
def test_small_a_wrong_kernel_is_not_used(model, monkeypatch):
    """A kernel that rounds to too few bits, one that does something else, and one that raises."""
    decoder = RepeatedStep(model)
    unfused = decoder.step()
    for wrong, message in (
        (lambda x: (x.float() * 1.01).to(x.dtype), "the kernel's error is above twice the module's"),
        (lambda x: -x, "it computes something else"),
        (lambda x: x.double(), "its result has dtype float16"),
        (lambda x: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
    ):
        own = Norm.fused
        with monkeypatch.context() as patch:
            patch.setattr(Norm, "fused", lambda self, variant, x, wrong=wrong, own=own: wrong(own(self, variant, x)))
            fusion = decoder.settled()
        assert f"norms 0/5 (layers.0.input_layernorm and 4 more: {message})" in fusion.report()
        assert "rotary 2/2, gate 2/2, products 4/4" in fusion.report()
        with fusion.in_force(model):
            assert (decoder.step() - unfused).norm() < 0.01 * unfused.norm()


@kernels.needs_interpreter
def test_small_adapters(model):
    """A group with an adapter stays plain, the others are fused; a gate between adapters is fused separately."""
    config = peft.LoraConfig(
        target_modules=["layers.1.self_attn.k_proj", "layers.0.mlp.up_proj"],
        modules_to_save=["model.norm"],
        init_lora_weights=False,
    )
    inner = peft.get_peft_model(model, config).eval().get_base_model().half()
    decoder = RepeatedStep(inner)
    assert decoder.settled().report() == (
        "norms 4/5 (norm: modules_to_save), rotary 2/2, gate 2/2, products 2/4 (layers.1.self_attn.k_proj and 1 more: LoRA)"
    )


@kernels.needs_interpreter
def test_small_more_rows_than_products_take(model):
    """The gate falls back to its activation."""
    ids = left_padded(1, 40)[0].expand(17, -1)
    cache, fusion = lb.from_preset("kivi-2", model), Fusion()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(2):
            assert not fusion.settled
            with fusion.observing(model):
                model(ids[:, :1], past_key_values=cache)
    assert fusion.settled
    assert fusion.report() == (
        "norms 5/5, rotary 2/2, gate 2/2, products 0/4 (layers.0.self_attn and 3 more: 17 rows; up to 16 are fused)"
    )


@kernels.needs_interpreter
def test_small_weights_that_change_in_place_count(model):
    """No kernel reads a copy."""
    decoder = RepeatedStep(model)
    fusion, before = decoder.settled(), decoder.step()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(1.5)
    unfused = decoder.step()
    assert (unfused - before).norm() > 0.1 * unfused.norm()
    with fusion.in_force(model):
        assert (decoder.step() - unfused).norm() < 0.01 * unfused.norm()


@kernels.needs_interpreter
def test_small_products_of_one_input_that_changes():
    """A module that writes into its input between two products gets those of what it wrote."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 16, bias=False).half() for _ in "qkv")

        def forward(self, x):
            q = self.q_proj(x)
            return q, self.k_proj(x.mul_(2)), self.v_proj(x)

    module = Writes().eval()
    x = torch.randn(1, 1, 32).half()
    with torch.no_grad():
        unfused, fusion = module(x.clone()), Fusion()
        with fusion.observing(module):
            assert all(map(torch.equal, module(x.clone()), unfused))
        assert fusion.report() == "products 0/1 (: its inputs differ)"
        fusion._variants["products", ""] = "products"  # even so
        with fusion.in_force(module):
            for out, want in zip(module(x.clone()), unfused, strict=True):
                torch.testing.assert_close(out, want)


@kernels.needs_interpreter
@pytest.mark.parametrize("rows", [1, 3])
def test_small_kernels_compile_ahead(model, rows, monkeypatch):
    """One launch of each kernel, in threads of their own, once. No module of the model runs there, because one of a model
    on several processes would wait for the others."""
    before, linear = dict(common.launches), torch.nn.Linear.forward
    here, called = threading.current_thread(), []

    def forward(module, x):
        if threading.current_thread() is not here and module in set(model.modules()):
            called.append(module)
        return linear(module, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    for _ in range(2):
        fusing.compile_ahead(model, rows)
        for thread in fusing._ahead.get(model, []):
            thread.join()
    names = ("rms_norm_kernel", "rotary_kernel", "products_kernel", "gated_product_kernel")
    assert [common.launches.get(name, 0) - before.get(name, 0) for name in names] == [1, 1, 1, 1]
    assert called == []
    monkeypatch.undo()
    assert RepeatedStep(model).settled().report() == FOUND["llama"]
    assert model not in fusing._ahead


# ---- what stays plain, and why; no kernel runs here --------------------------------------------------------------------


def reasons(model):
    return {(each.kind, each.name): each.reason for each in find_pieces(model) if isinstance(each, Unfused)}


def gates(model):
    return [each.name for each in find_pieces(model) if isinstance(each, Piece) and each.kind == "gate"]


def _hook(model):
    model.model.norm.register_forward_hook(lambda *_: None)
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda *_: None)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)


def _own_forward(model):
    norm = model.model.norm
    norm.forward = norm.forward


def _compiled(model):
    model.model.layers[0].compile(backend="eager")
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")


def _train(model):
    model.model.layers[0].self_attn.train()


def _liger(model):
    type_ = type(model.model.norm)
    model.model.norm.__class__ = type("LigerRMSNorm", (type_,), {"__module__": "liger_kernel.transformers.rms_norm"})


def _subclass(model):
    linear = model.model.layers[0].self_attn.k_proj
    linear.__class__ = type("Quantized", (nn.Linear,), {})


def _clamped(model):
    mlp = model.model.layers[0].mlp
    base = type(mlp)
    forward = lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=100.0) * self.up_proj(x))  # noqa: E731
    mlp.__class__ = type("Clamped", (base,), {"forward": forward})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            _hook,
            {
                ("norms", "norm"): "hooks",
                ("products", "layers.0.self_attn.v_proj"): "hooks",
                ("gate", "layers.1.mlp.act_fn"): "hooks",
            },
        ),
        (_own_forward, {("norms", "norm"): "its forward is replaced already"}),
        (
            _compiled,
            dict.fromkeys(
                [
                    ("norms", "layers.0.input_layernorm"),
                    ("norms", "layers.0.post_attention_layernorm"),
                    ("rotary", "layers.0.self_attn"),
                    ("products", "layers.0.self_attn"),
                    ("gate", "layers.0.mlp"),
                    ("products", "layers.0.mlp"),
                    ("gate", "layers.1.mlp"),
                    ("products", "layers.1.mlp"),
                ],
                "compiled",
            ),
        ),
        (
            _train,
            {("rotary", "layers.0.self_attn"): "train()", ("products", "layers.0.self_attn.q_proj"): "train()"},
        ),
        (_liger, {("norms", "norm"): "already patched by Liger-Kernel"}),
        (_subclass, {("products", "layers.0.self_attn.k_proj"): "Quantized"}),
        (_clamped, {}),
    ],
)
def test_what_stays_plain(model, change, expected):
    change(model)
    assert reasons(model) == expected
    assert ("layers.0.mlp" in gates(model)) == (change not in (_compiled, _clamped))


def test_layers_of_one_class_that_differ_in_a_number(model):
    """As those of Step 3.7, of which only the last clamp. The first step may not reach the limit."""

    class Clamped(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=self.limit) * self.up_proj(x))

    class Centered(type(model.model.norm)):
        def forward(self, x):
            return super().forward(x - x.mean(-1, keepdim=True) if self.centered else x)

    for index, layer in enumerate(model.model.layers):
        layer.mlp.__class__, layer.mlp.limit = Clamped, [float("inf"), 100.0][index]
        layer.input_layernorm.__class__, layer.input_layernorm.centered = Centered, index == 1
    assert gates(model) == ["layers.0.mlp"]
    assert reasons(model) == {("norms", "layers.1.input_layernorm"): "no RMS norm"}


def test_what_keeps_the_whole_model_plain(model):
    assert why_nothing_fused(model) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert why_nothing_fused(model) == "autocast"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert why_nothing_fused(model) == "hooks of all modules"
    handle.remove()
    assert why_nothing_fused(model.train()) == "train()"


def test_a_model_that_cannot_be_looked_into_decodes_plain(model, monkeypatch):
    decoder, fusion = RepeatedStep(model), Fusion()
    unfused = decoder.step()
    model.model.layers[0].mlp.named_children = None
    with fusion.observing(model):
        assert torch.equal(decoder.step(), unfused)
    assert fusion.settled
    assert not fusion.any
    assert fusion.report() == "nothing: TypeError: 'NoneType' object is not callable"


def test_agreement():
    def agree(*results):
        errors = errors_of(*results)
        return agreement(errors.largest[None], errors.eps)[0].tolist()

    exact = torch.randn(4, 100, dtype=torch.float64)
    unfused = exact.bfloat16()
    same = (unfused, unfused, exact)
    assert agree(*same) == [True, True]
    off = unfused.clone()
    off[2, 5] += 0.04 * exact[2].abs().max()
    assert agree(off, unfused, exact) == [False, False]
    assert agree(unfused, off, exact) == [False, True]
    off[2, 5] = unfused[2, 5] + 0.02 * exact[2].abs().max()
    assert agree(off, unfused, exact) == [True, False]
    off[2, 5] = float("nan")
    assert agree(off, unfused, exact) == [False, False]
    empty = exact.clone()
    empty[2] = float("nan")  # a row without a token
    assert agree(empty.bfloat16(), empty.bfloat16(), empty) == [True, True]
    assert agree(off, empty.bfloat16(), empty) == [True, True]
    assert agree(empty.bfloat16(), unfused, exact) == [False, False]
    assert agree(*(torch.full_like(x, float("nan")) for x in (unfused, unfused, exact))) == [False, True]


def test_decorated_functions_get_other_globals():
    import functools

    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args):
            return "decorated", function(*args)

        return wrapper

    unfused = decorated(decorated(_calls_a_global))
    other = with_globals(unfused, {"_value": lambda: 2})
    assert unfused() == ("decorated", ("decorated", 1))
    assert other() == ("decorated", ("decorated", 2))
    keeper = functools.partial(_calls_a_global)
    keeper.__wrapped__ = _calls_a_global
    with pytest.raises(NotFusedError, match="decorated in an unusual way"):
        with_globals(keeper, {})


def _value():
    return 1


def _calls_a_global():
    return _value()


class Interrupted(Norm):
    """Ctrl-C while a step runs."""

    def fused(self, variant, x):
        raise KeyboardInterrupt


def test_an_interrupted_step_leaves_nothing(model, monkeypatch):
    before = attributes(model)
    decoder = RepeatedStep(model)
    unfused = decoder.step()
    monkeypatch.setattr(Norm, "fused", Interrupted.fused)
    with pytest.raises(KeyboardInterrupt), Fusion().observing(model):
        decoder.step()
    assert attributes(model) == before
    assert torch.equal(decoder.step(), unfused)


def test_other_threads_get_the_modules_own_forward(model, monkeypatch):
    decoder = RepeatedStep(model)
    unfused, fusion, results = decoder.step(), decoder.settled(), []
    monkeypatch.setattr(Norm, "fused", lambda self, variant, x: torch.zeros_like(x))
    with fusion.in_force(model):
        thread = threading.Thread(target=lambda: results.append(decoder.step()))
        thread.start()
        thread.join()
        mine = decoder.step()
    assert torch.equal(results[0], unfused)
    assert not torch.equal(mine, unfused)


# ---- recorded, with fake graphs: only norms are fused --------------------------------------------------------------------


def summary_of(out):
    return " ".join(out.past_key_values.summary().replace("│", "").split())


def test_recorded_with_fused_norms(graphs):
    model = model_of("llama", torch.float32)
    ids, mask = left_padded(2, 60)
    options = {"return_dict_in_generate": True, "output_logits": True, "new_tokens": 20, "preset": "dense"}
    want = ours(model, ids, mask, step="eager", **options)
    before = attributes(model)
    out = ours(model, ids, mask, fuse=True, **options)
    assert attributes(model) == before
    # of 19 steps one is observed and one warms the fused step up
    assert [graph.replays for graph in graphs] == [17]
    assert "recorded; fused: norms 5/5" in summary_of(out)
    # rounding changes; the random logits of a tiny model make no close calls here
    assert torch.equal(out.sequences, want.sequences)
    for got, expected in zip(out.logits, want.logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    del out
    again = ours(model, ids, mask, fuse=True, **options)
    assert [graph.replays for graph in graphs] == [17 + 19]
    del again
    # a kept cache does not replay a fused recording under fuse=False
    unfused = ours(model, ids, mask, fuse=False, **options)
    assert [graph.replays for graph in graphs] == [36, 18]
    assert all(map(torch.equal, unfused.logits, want.logits))
    assert "recorded; fused: nothing: fuse=False" in summary_of(unfused)


def test_a_fused_step_that_cannot_be_recorded_is_recorded_plain(graphs, monkeypatch):
    model = model_of("llama", torch.float32)
    ids, mask = left_padded(2, 60)
    want = ours(model, ids, mask, step="eager")
    own, calls = Norm.fused, []

    def fused(self, variant, x):
        calls.append(x)
        if len(calls) > 10:  # of five norms: the third time, while the step is recorded
            raise RuntimeError("not now")
        return own(self, variant, x)

    monkeypatch.setattr(Norm, "fused", fused)
    out = ours(model, ids, mask, fuse=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, want)
    assert graphs[-1].replays > 0
    assert "fused: nothing: recording it failed: RuntimeError: not now" in summary_of(out)


def test_enabled_models_fuse(graphs):
    model = model_of("llama", torch.float32)
    ids = left_padded(1, 40)[0]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    for fuse, expected in ((True, "norms 5/5"), (False, "nothing: fuse=False")):
        with lb.enable(model, "kivi-2", fuse=fuse):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert f"recorded; fused: {expected}" in summary_of(out)


# ---- what the user has compiled ---------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen(FakeGraph):
    """Runs what it shall record, and sees whether that runs compiled; a dispatch mode, as `FakeGraph` has, would keep compiled
    code from running."""

    stances: ClassVar[list[str]] = []

    def capture(self, call):
        self.stances.append(torch._dynamo.eval_frame._stance.stance)
        call()
        raise RuntimeError("this graph records nothing")


def test_compiled_layers_stay_compiled_in_a_recording(monkeypatch, dynamo):
    """Steps run until torch compiles nothing more; then one is recorded, in which nothing may be compiled."""
    model = model_of("llama", torch.float32)
    ids, mask = left_padded(2, 60)
    traced, ran = [], []

    def backend(graph, inputs):
        traced.append(graph)

        def run(*args):
            ran.append(len(Seen.stances))
            return graph.forward(*args)

        return run

    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)
    Seen.stances.clear()
    monkeypatch.setattr(recording, "graphs_for", lambda device: Seen)
    with pytest.warns(
        UserWarning, match="cannot be recorded: recording it failed: RuntimeError: this graph records nothing"
    ):
        out = ours(model, ids, mask, fuse=True, return_dict_in_generate=True)
    assert "this graph records nothing" in summary_of(out)
    # with pieces fused, and again without
    assert Seen.stances == ["fail_on_recompile", "fail_on_recompile"]
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert traced
    assert {1, 2} <= set(ran)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_layers_with_graphs_of_their_own_are_refused(graphs, dynamo):
    model = model_of("llama", torch.float32)
    model.model.layers[1].mlp.compile(mode="reduce-overhead")
    why = recording.why_not_recorded(model)
    assert why.startswith("model.layers.1.mlp is compiled with its own CUDA graphs")
    model.model.layers[1].mlp._compiled_call_impl = None
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, options={"triton.cudagraphs": True})
    assert "its own CUDA graphs" in recording.why_not_recorded(model)
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp._orig_mod)
    assert recording.why_not_recorded(model) is None
