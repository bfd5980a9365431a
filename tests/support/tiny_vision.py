"""Small vision-language models with random weights, and a prompt of text and one image (pixel values without a
processor)."""

from typing import Any, NamedTuple

import torch
from tiny_architectures import CHANGES, SIZES, _is_computed, tiny_configuration
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

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
ARCHITECTURES: dict[str, dict[str, Any]] = {
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
    changes |= ARCHITECTURES[name]
    changes |= {"text_config": small_text, "vision_config": type(vision)(**towers)}
    return type(config)(**changes)


def _small_text(text: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's small configuration. If the decoder is an architecture itself, `tiny_configuration` makes it."""
    if text.model_type in CONFIG_MAPPING and text.model_type not in ARCHITECTURES:
        return tiny_configuration(text.model_type)
    fields = text.to_dict()
    changes = {
        field: small
        for field, small in SIZES.items()
        if field in fields and not _is_computed(text, field) and (fields[field] is not None or field.endswith("_id"))
    }
    changes |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
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
