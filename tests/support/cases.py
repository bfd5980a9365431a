"""The matrix that every format and every model family goes through. A new format adds one row to `FORMAT_CASES`."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration_files.model_description import describe_model
from hf_lowbit_kv.presets import PAPER_PRESETS
from hf_lowbit_kv.storage.layer_spec import LayerSpec

_NEWEST, _SLOW = pytest.mark.newest, pytest.mark.slow
#: (key format, value format) pairs as parameters: every format on each side at least once. Slow: pairs that have the paths of
#: another, with another width, other groups or without one of its steps. What formats store does not depend on transformers:
#: of tests that are marked `host` `make test` runs one pair on the oldest version
FORMAT_CASES = [
    pytest.param(("dense", "dense"), marks=_NEWEST),
    pytest.param(("int2-channel", "int2-token")),
    pytest.param(("int4-channel", "int4-token"), marks=_NEWEST),
    pytest.param(("int4-token", "int4-token"), marks=_SLOW),
    pytest.param(("int8-token", "int8-token"), marks=_NEWEST),
    pytest.param(("int8-channel-g32", "int2-token-g32"), marks=_SLOW),
    pytest.param(("int2-token-g32", "int4-channel"), marks=_SLOW),
    pytest.param(("int4-channel", "dense"), marks=_SLOW),
    pytest.param(("int6-token", "int5-token"), marks=_SLOW),
    pytest.param(("int5-channel", "int6-channel-g32"), marks=_SLOW),
    pytest.param(("boosted2-r0.125", "int2-token"), marks=_NEWEST),
    pytest.param(("fp8", "fp8-static"), marks=_SLOW),
    pytest.param(("fp8", "fp8"), marks=_NEWEST),
    pytest.param(("vq-d4b6", "vq-d8b5"), marks=_NEWEST),
    pytest.param(("static-54222100", "static-3-tn"), marks=_NEWEST),
    pytest.param(("static-64332222", "static-2-tn"), marks=_SLOW),
    pytest.param(("fp8-centered", "fp8"), marks=_NEWEST),
]
FORMATS = [case.values[0] for case in FORMAT_CASES]


def with_windows(*windows: tuple) -> list:
    """Each format with the first window. With the second one few formats are fast: two whose tokens go into pages one by one,
    and in groups. The rest is slow."""
    cases = []
    for case in FORMAT_CASES:
        (formats,) = case.values
        for number, window in enumerate(windows):
            fast = number == 0 or (number == 1 and formats[0] in ("int2-channel", "int8-token"))
            marks = case.marks if fast else (*case.marks, _SLOW)
            cases.append(pytest.param(formats, *window, marks=marks, id=f"{'/'.join(formats)}-{window}"))
    return cases


def every_preset() -> list[str]:
    """The listed presets, and those as in the papers that store something else: one for each spec."""
    first: dict[LayerSpec, str] = {}
    for name in (*lb.preset_names(), *PAPER_PRESETS):
        first.setdefault(lb.get_preset(name).spec(), name)
    return list(first.values())


#: small pages, so that short prompts are packed
SMALL_PAGES = {"page_size": 32, "residual": 32}

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MANY_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_MAMBA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}

#: tiny random models: model_type -> configuration beyond `_SMALL`
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": _MANY_EXPERTS,
    "mistral": {"sliding_window": None},
    "mixtral": _EXPERTS,
    "phi3": {"hidden_size": 256},  # phi3 has no head_dim of its own
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    # layers 2 to 4 attend to the keys and values of layers 0 and 1
    "gemma4_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 3,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
    },
    # keys are wider than values
    "mimo_v2_flash": {
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], **_EXPERTS},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], **_DELTA, **_MANY_EXPERTS},
    "lfm2": {"hidden_size": 256, "layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, **_MAMBA},
}


#: parameters that are no matrices of a product
_NOT_SCALED = ("norm", "A_log", "dt_bias")


def tiny_config(family: str, **changes):
    return AutoConfig.for_model(family, **{**_SMALL, **FAMILIES.get(family, {}), **changes})


def tiny_models(family: str, **changes):
    """Two models with the same random weights: one with our attention, one with transformers' own. Each call's are its own."""
    key = f"{family} {changes}"
    torch.manual_seed(0)
    if key not in _made:
        _made[key] = *_tiny_models(family, **changes), torch.get_rng_state()
    ours, theirs, state = _made[key]
    torch.set_rng_state(state)
    return copy.deepcopy(ours), copy.deepcopy(theirs)


#: what `tiny_models` copies: making a model takes longer
_made: dict[str, tuple] = {}


def _tiny_models(family: str, **changes):
    config = tiny_config(family, **changes)
    host = "eager" if family in ("gemma2", "gpt_oss", "mimo_v2_flash") else "sdpa"
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation=host).eval()
    # random weights of the default size give nearly uniform logits; larger ones make greedy choices clear
    for name, parameter in theirs.named_parameters():
        if not any(part in name for part in _NOT_SCALED):
            parameter.data.mul_(4)
    # a model keeps the configuration it is made from, and the attention implementation with it
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="lowbit_kv").eval()
    ours.load_state_dict(theirs.state_dict())
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == (host, "lowbit_kv")
    return ours, theirs


def _random(name: str, shape, generator) -> torch.Tensor:
    """Numbers of both signs, but steps are positive."""
    return (
        (torch.rand(shape, generator=generator) + 0.5)
        if name.endswith(".step")
        else torch.randn(shape, generator=generator)
    )


def random_parameters(model, spec):
    """By layer, random tensors for what `spec` asks for; each layer and KV head has its own."""
    gen = torch.Generator().manual_seed(7)
    return {
        layer: {
            name: _random(name, shape, gen).to(dtype) for name, shape, dtype in spec.parameters(first, second, heads)
        }
        for layer, (heads, first, second) in packed_sizes(model).items()
    }


def factors(number: float = 1.0) -> torch.Tensor:
    """`[H, D]`, the factors of a layer's keys: other numbers, other factors."""
    return torch.linspace(0.5, 2, 128).view(2, 64) * number


def calibration_of(model, number: float = 1.0) -> lb.Calibration:
    """Of the transform `smooth` for keys, with the same factors in each layer."""
    sizes = packed_sizes(model)
    tensors = {f"layers.{layer}.keys.smooth.factors": factors(number) for layer in sizes}
    return lb.Calibration(tensors, describe_model(model, sizes))


def cache_of(model, formats, **options):
    """A cache of these formats of keys and values, with random parameters where they take some."""
    spec = lb.LayerSpec(*map(lb.parse_format, formats))
    return lb.LowBitCache(model, *formats, parameters=random_parameters(model, spec), **options)


def left_padded(batch: int, tokens: int, vocab_size: int = 160, seed: int = 0):
    """Token ids and attention mask `[batch, tokens]`; row `b` starts with `7 * b` padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : 7 * row], mask[row, : 7 * row] = 0, 0
    return ids, mask


def continued(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """The mask `[batch, n]` of stored tokens, and of `tokens` more in each row."""
    return torch.nn.functional.pad(mask, (0, tokens), value=1)


def filled(model, preset="kivi-2", **options):
    """A cache of small pages that holds 80 tokens."""
    cache = lb.from_preset(preset, model, **{**SMALL_PAGES, **options})
    ids, _ = left_padded(1, 80)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def read(model, cache, ids, mask=None):
    """Logits of the last token `[B, vocabulary]`."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, **as_argument(cache)).logits[:, -1]


class Counted:
    """Counts the tokens of a row, padding included, that go through a model from now on; as a context, those inside of it."""

    def __init__(self, model):
        self.tokens = 0
        self.hook = model.get_input_embeddings().register_forward_pre_hook(self._see)

    def _see(self, module, args):
        self.tokens += args[0].shape[1]

    def taken(self) -> int:
        """Those since the last call."""
        tokens, self.tokens = self.tokens, 0
        return tokens

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.hook.remove()


def next_logits(model, cache):
    with torch.no_grad():
        return model(torch.tensor([[5]]), past_key_values=cache).logits
