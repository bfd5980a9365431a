"""Tiny random models with multi-head latent attention (MLA), and which model folders of transformers have it."""

import copy
import importlib
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

GREEDY = {"do_sample": False, "pad_token_id": 0}
SMALL_PAGES = {"page_size": 32}
#: no experts
DENSE_MLP = {"first_k_dense_replace": 2}
#: what most of these architectures understand; others ignore what they do not know
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "vocab_size": 160,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
#: configuration beyond `SMALL`
MORE = {
    "kimi_linear": _MIXED,
    "bailing_hybrid": _MIXED,
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "head_dim": 16,
    },
    "glm5_next": {"qk_rope_head_dim": 0},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
}
_NOT_SCALED = ("norm", "A_log", "dt_bias")


def folders() -> list[str]:
    """The model folders of the installed transformers that define `expand_kv`."""
    models = Path(transformers.__file__).parent / "models"
    files = sorted(models.glob("*/modeling_*.py"))
    return [file.parent.name for file in files if "def expand_kv" in file.read_text(encoding="utf-8")]


def module_of(folder: str):
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def attention_class(folder: str) -> type:
    """The class that defines `expand_kv`."""
    return next(cls for cls in vars(module_of(folder)).values() if isinstance(cls, type) and "expand_kv" in vars(cls))


def tiny_config(folder: str, **changes):
    """A configuration for the text model of that folder."""
    module = module_of(folder)
    classes = [cls for name, cls in vars(module).items() if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]
    configs = {cls.config_class for cls in classes if cls.config_class is not None}
    text = [cls for cls in configs if cls.__name__.endswith("TextConfig")] or list(configs)
    return text[0](**{**SMALL, **MORE.get(folder, {}), **changes})


def tiny_models(folder: str, dtype: torch.dtype = torch.float32, **changes):
    """Two models with the same random weights: one with our attention, one with transformers' SDPA."""
    module, config = module_of(folder), tiny_config(folder, **changes)
    name = next(name for name in vars(module) if name.endswith("ForCausalLM"))
    torch.manual_seed(0)
    theirs = getattr(module, name)._from_config(config, attn_implementation="sdpa").eval().to(dtype)
    # random weights of the default size give nearly uniform logits; larger ones make greedy choices clear
    for name_, parameter in theirs.named_parameters():
        if not any(part in name_ for part in _NOT_SCALED):
            parameter.data.mul_(4)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("lowbit_kv")
    theirs.set_attn_implementation("sdpa")
    return ours, theirs


def attentions(model) -> list[torch.nn.Module]:
    """The attention modules that cache a latent."""
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]


def prompt(batch=2, tokens=50, padded=0):
    """Inputs of random tokens; row `b` is padded on the left by `padded * b`."""
    ids = torch.randint(3, 160, (batch, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : padded * row], mask[row, : padded * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def replaced(model):
    """The attention modules whose method is replaced."""
    return [module for module in attentions(model) if "expand_kv" in vars(module)]
