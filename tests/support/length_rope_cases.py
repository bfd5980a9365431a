"""Tiny models whose rotary embeddings change beyond `LIMIT` tokens, and what a text that is read whole gives."""

import copy
import inspect

import torch
from cases import tiny_models
from chat_cases import words
from generation_cases import GREEDY
from tiny_architectures import tiny_configuration
from transformers import AutoModelForCausalLM, modeling_rope_utils

LIMIT = 100
#: models that drop their cache at the limit
PHI = ("phi3", "phimoe", "phi4_multimodal")
ROPES = ("longrope", "dynamic")
#: the oldest transformers reads a value from the device instead
SWITCHES_IN_PLACE = "copy_" in inspect.getsource(modeling_rope_utils.dynamic_rope_update)
#: sizes of the towers that read images and sounds, which no test here uses
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "crop_size": 56,
    "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64,
    "nemo_conv_channels": 64,
}


def longrope(half: int, **more) -> dict:
    """half: pairs of channels of a head."""
    factors = {"short_factor": [1.0] * half, "long_factor": [4 + i / 4 for i in range(half)]}
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": LIMIT, **factors, **more
    }  # fmt: skip


def rope_models(kind: str, family: str = "llama"):
    """Two models with the same weights: one with our attention, one with transformers'."""
    if kind == "longrope":
        return tiny_models(family, rope_parameters=longrope(32))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return tiny_models(family, rope_parameters=rope, max_position_embeddings=LIMIT)


def phi_models(name: str):
    """Two models of a kind that drops its cache."""
    config = tiny_configuration(name)
    half = config.hidden_size // config.num_attention_heads // 2
    more = {"short_mscale": 1.1, "long_mscale": 1.6} if name == "phimoe" else {"partial_rotary_factor": 1.0}
    config.rope_parameters = longrope(half, **more)
    config.original_max_position_embeddings = LIMIT
    for tower in ("vision_config", "audio_config"):
        for field, value in _TOWER.items():
            if hasattr(getattr(config, tower, None), field):
                setattr(getattr(config, tower), field, value)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="lowbit_kv").eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def ids_of(tokens: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 150, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def error(out, truth) -> float:
    """Largest difference of logits, in standard deviations."""
    ours, whole = torch.cat(out.logits), torch.cat(truth.logits)
    return float((ours - whole).abs().max() / whole.std())


def left_padding(ids, padding=(0,)):
    """Inputs of a model: so many tokens at the front of each row become padding."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def check_chat(chat, theirs, turns, **options) -> None:
    """Send messages of so many words. Answers, of 6 tokens, are those of transformers' model to the whole conversation."""
    for turn, count in enumerate(turns):
        messages = [*chat.messages, {"role": "user", "content": words(count, turn)}]
        ids = chat.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        want = theirs.generate(**left_padding(ids.clone()), max_new_tokens=6, **GREEDY, **options)
        answer = chat.send(messages[-1]["content"])
        assert answer == chat.tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True), turn
