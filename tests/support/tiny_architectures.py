"""Small models of every decoder architecture of transformers: random weights, few channels, the real order of layer
kinds. Vision-language models too, and a prompt of text and one image (pixel values without a processor)."""

from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

#: field of a configuration -> its small value, if the architecture has the field
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "n_embd": 256,
    "d_model": 256,
    "emb_dim": 256,
    "word_embed_proj_dim": 256,
    "intermediate_size": 128,
    "n_inner": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "n_ctx": 1024,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 32,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "is_decoder": True,
}
#: of an indexer, which chooses the tokens to attend to
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
#: a small stack of layers inside of another model
_STACK = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
#: further or other values that some architectures need; `...` keeps the architecture's own value
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "topk_method": "greedy", "num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": False},
    "hunyuan_v1_dense": {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "hunyuan_v1_moe": {
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "moe_topk": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "helium": {"head_dim": 64},
    "longcat_flash": {"head_dim": 16},
    "mimo_v2_flash": {"v_head_dim": ...},
    "mistral": {"sliding_window": None},
    "ministral": {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "nemotron": {"head_dim": 64, "num_key_value_heads": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 64},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 64},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512},
    "mamba2": {"num_heads": 8, "head_dim": 64, "expand": 2},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 8},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64},
        "num_key_value_heads": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        **{f"{name}_config": _STACK for name in ("patcher", "encoder", "decoder")},
        "global_config": {**_STACK, "hidden_size": 128},
    },
    "phi4_multimodal": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 1024,
        "vision_config": {**_STACK, "num_hidden_layers": 2, "image_size": 56, "crop_size": 56},
        "audio_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size", "ext_pw_out_channel", "nemo_conv_channels"), 64),
            **{"depthwise_separable_out_channel": 64, "num_attention_heads": 2, "num_blocks": 2},
        },
    },
    "xmod": {"default_language": "en_XX"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gemma4": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text": {
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 6,
        "use_bidirectional_attention": "vision",
    },
    "gemma3n_text": {"num_hidden_layers": 10, "layer_types": ..., "num_kv_shared_layers": 5, "intermediate_size": 128},
    "gemma3n": {"num_hidden_layers": 10, "layer_types": ..., "num_kv_shared_layers": 5, "intermediate_size": 128},
}


def names() -> list[str]:
    """Model types for which transformers has a causal language model, without encoder-decoders."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not getattr(CONFIG_MAPPING[name], "is_encoder_decoder", False)
    )


def _is_computed(config: PreTrainedConfig, field: str) -> bool:
    return isinstance(getattr(type(config), field, None), property)


def _small_values(config: PreTrainedConfig) -> dict[str, Any]:
    """`SIZES` of the fields that a configuration has."""
    fields = config.to_dict()
    return {
        field: small
        for field, small in SIZES.items()
        if field in fields and not _is_computed(config, field) and (fields[field] is not None or field.endswith("_id"))
    }


def tiny_configuration(name: str) -> PreTrainedConfig:
    """The decoder's configuration of this model type, with small sizes; of an assistant model the whole configuration."""
    if name.endswith("_assistant"):
        text = tiny_configuration(name.replace("_assistant", "_text")).to_dict()
        own = {field: 0 for field in ("hidden_size_per_layer_input", "vocab_size_per_layer_input") if field in text}
        whole: Any = CONFIG_MAPPING[name]
        return whole(text_config=text | own | {"num_kv_shared_layers": text["num_hidden_layers"]})
    config = CONFIG_MAPPING[name]().get_text_config(decoder=True)
    fields, changes = config.to_dict(), _small_values(config)
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if kv_heads is not None:
        changes["num_key_value_heads"] = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    kinds = fields.get("layer_types") or getattr(config, "layers_block_type", None)
    kinds = list(kinds or ())
    layers = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if fields.get("layer_types") and not _is_computed(config, "layer_types"):
        changes["layer_types"] = kinds[:layers]
    changes |= {
        field: layers for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if field in fields
    }
    changes |= CHANGES.get(name, {})
    return type(config)(**{field: value for field, value in changes.items() if value is not ...})


def tiny_model(name: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """A causal language model of this type in float32, with random weights from `seed`."""
    torch.manual_seed(seed)
    config = tiny_configuration(name)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        torch.manual_seed(seed)
        if "Unrecognized configuration class" in str(error):  # the decoder's configuration is not one of a whole model
            model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])._from_config(config)
        else:  # gpt-oss and others do not support PyTorch's attention
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


# ---- models that see ------------------------------------------------------------------------------------------------


#: field of a vision tower's configuration -> its small value, if the tower has the field
VISION_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vocab_size": 160,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "projection_dim": SIZES["hidden_size"],
}
#: the token that represents a part of the image
IMAGE_TOKEN = 159
#: architectures, and further values that their configurations need
VISION_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "aya_vision": {},
    "cohere2_vision": {},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"audio_config": None},
    "glm4v": {},
    "idefics3": {},
    "internvl": {"downsample_ratio": 0.5},
    "llava": {"vision_feature_layer": -1},
    "mistral3": {"vision_feature_layer": -1},
    "paligemma": {"projection_dim": SIZES["hidden_size"]},
    "qwen2_5_vl": {},
    "qwen2_vl": {},
    "qwen3_5": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "smolvlm": {},
    "vipllava": {"vision_feature_layers": [-1, -1]},
}


class Prompt(NamedTuple):
    """The output of a processor for a text and an image: ids `[1, S]`, and the image's tensors by name."""

    ids: torch.Tensor
    image: dict[str, torch.Tensor]


def tiny_vision_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A vision-language model of this type in float32, with random weights from `seed`."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(tiny_vision_configuration(name))
    for parameter in model.parameters():
        if not bool(parameter.any()):  # a projection that starts as zeros would hide the image
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tiny_vision_configuration(name: str) -> PreTrainedConfig:
    """A configuration with a small text model and a small vision tower."""
    config = CONFIG_MAPPING[name]()
    text = config.get_text_config(decoder=True)
    vision = config.vision_config or CONFIG_MAPPING[f"{name}_vision"]()
    towers: dict[str, Any] = {
        field: small
        for field, small in VISION_SIZES.items()
        if hasattr(vision, field) and not _is_computed(vision, field)
    }
    if hasattr(vision, "out_hidden_size"):
        towers["out_hidden_size"] = SIZES["hidden_size"]
    elif hasattr(vision, "embed_dim"):  # Qwen2-VL: the width of the text model
        towers["hidden_size"] = SIZES["hidden_size"]
    if hasattr(vision, "pooling_kernel_size"):  # Gemma 4: patches with places, which are pooled
        towers |= {"pooling_kernel_size": 2, "head_dim": 32, "num_key_value_heads": 2}
    if isinstance(getattr(vision, "image_size", None), (list, tuple)):
        towers |= {"image_size": [56, 56], "patch_size": [14, 14]}
    small_text = _small_text(text)
    if text.model_type in ("qwen2_vl_text", "qwen2_5_vl_text"):  # parts of half a head's channels: time, height, width
        small_text.rope_parameters = {**small_text.rope_parameters, "mrope_section": [8, 12, 12]}
    changes: dict[str, Any] = {
        field: IMAGE_TOKEN for field in ("image_token_id", "image_token_index") if hasattr(config, field)
    }
    changes |= VISION_ARCHITECTURES[name]
    changes |= {"text_config": small_text, "vision_config": type(vision)(**towers)}
    return type(config)(**changes)


def _small_text(text: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's small configuration. If the decoder is an architecture itself, `tiny_configuration` makes it."""
    if text.model_type in CONFIG_MAPPING and text.model_type not in VISION_ARCHITECTURES:
        return tiny_configuration(text.model_type)
    changes = _small_values(text) | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    return type(text)(**(changes | CHANGES.get(text.model_type, {})))


@torch.no_grad()
def prompt_with_image(model: Any, tokens: int = 60) -> Prompt:
    """One image between random tokens. The image has as many tokens as the model makes of it."""
    generator = torch.Generator().manual_seed(2)
    image = _image(model.config, generator)
    features = model.get_image_features(**image) if hasattr(model, "get_image_features") else None
    features = getattr(features, "pooler_output", features)
    images: list[Any] = list(features) if isinstance(features, (list, tuple)) else [features]
    places = sum(x.shape[:-1].numel() for x in images)
    text = torch.randint(3, 150, (tokens,), generator=generator)
    ids = torch.cat([text[: tokens // 2], torch.full((places,), IMAGE_TOKEN), text[tokens // 2 :]])[None]
    if model.config.model_type == "gemma4":  # blocks of tokens, some of which attend to each other
        image["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    if model.config.model_type in ("gemma3", "paligemma"):  # tokens of an image, or of a prefix, attend to each other
        image["token_type_ids"] = (ids == IMAGE_TOKEN).int()
    if "image_grid_thw" in image:  # the model must distinguish positions in the image from those in the text
        image["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    return Prompt(ids, image)


def _image(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    vision = config.vision_config
    if hasattr(vision, "temporal_patch_size"):  # one row of patches, and their numbers in time, height and width
        patch, merged = vision.patch_size, vision.spatial_merge_size
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        high = wide = 2 * merged
        width = channels * vision.temporal_patch_size * patch * patch
        pixels = torch.randn(high * wide, width, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, high, wide]])}
    if hasattr(vision, "pooling_kernel_size"):  # one row of patches, and the places of patches
        pixels = torch.rand(1, 16, 3 * vision.patch_size**2, generator=generator)
        places = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], -1)[None]
        return {"pixel_values": pixels, "image_position_ids": places}
    size = vision.image_size[0] if isinstance(vision.image_size, (list, tuple)) else vision.image_size
    pixels = torch.randn(1, 3, size, size, generator=generator)
    if config.model_type in ("idefics3", "smolvlm"):
        return {"pixel_values": pixels[None]}
    if config.model_type == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[size, size]])}
    return {"pixel_values": pixels}
