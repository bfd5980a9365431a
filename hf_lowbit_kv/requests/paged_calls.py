"""`generate_batch` and `init_continuous_batching` of a model under `lb.enable`: they run on packed pages, or are refused.

transformers ignores some options of these calls silently. Here they raise, before anything is allocated.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from ..generation.enable import also_override, enabled_for

# the package's public `enable` and `disable` come from here, so that they know the calls of this file
from ..generation.enable import disable as disable
from ..generation.enable import enable as enable
from ..generation.generation_settings import check_served, check_values
from ..generation.overriding import original
from ..presets import get_preset
from ..storage.process_stamps import ignore_attributes
from .pool_models import empty_caches

#: releases of transformers whose continuous batching `continuous_batching.py` was written for
SUPPORTED = ("5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")
#: attribute of a model in which transformers keeps a manager
_MANAGER = "_cached_continuous_batching_manager"
#: settings that continuous batching would ignore -> what to do instead
_NOT_SERVED = dict.fromkeys(
    (
        *("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "use_mtp"),
        *("token_healing", "assistant_early_exit", "stop_strings", "max_time", "constraints", "force_words_ids"),
        *("guidance_scale", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    ),
    "continuous batching would ignore it; use lb.generate_many or lb.generate",
)
#: settings of transformers' own memory and graphs, and their values for packed pages
_NOT_SET = {
    "use_async_batching": (None, False),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "cpu_offload_space": (0, 0.0),
}


def check_version() -> None:
    """Raise `RuntimeError` for a release of transformers whose continuous batching cannot use packed pages."""
    release = ".".join(transformers.__version__.split(".")[:2])
    if release not in SUPPORTED:
        raise RuntimeError(
            f"transformers {transformers.__version__}: continuous batching on packed pages works with the releases "
            f"{', '.join(SUPPORTED)}. Use one of these or lb.generate_many; lb.disable(model) allows it in 16 bits"
        )


def init_continuous_batching(
    self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
) -> Any:
    """transformers' `init_continuous_batching`, on packed pages."""
    check_version()
    from transformers import ContinuousBatchingConfig

    from .continuous_batching import PackedManager

    enabled = enabled_for(self)
    if enabled is None:  # a copy of an enabled model
        return original(self, "init_continuous_batching")(generation_config, continuous_batching_config, workload_hints)
    kept = getattr(self, _MANAGER, None)
    if isinstance(kept, PackedManager) and kept.made_for is enabled:
        return kept
    if kept is not None:
        raise RuntimeError(
            "the model keeps a manager of other pages (persistent_manager=True): call "
            "model.destroy_cached_continuous_batching_manager() first"
        )
    config = continuous_batching_config or ContinuousBatchingConfig()
    generation = generation_config if generation_config is not None else self.generation_config
    if generation.eos_token_id is None:
        generation = GenerationConfig.from_dict(generation.to_dict() | {"eos_token_id": -1})
    _check_config(config, enabled.preset)
    _check_generation(self, generation)
    make = empty_caches(self, enabled.preset, enabled.options)
    return PackedManager(self, enabled, make, config, generation_config=generation, workload_hints=workload_hints)


def generate_batch(self: Any, inputs: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate_batch`, on packed pages. Options that it would ignore raise `TypeError`."""
    check_version()
    call_options = ("continuous_batching_config", "record_timestamps", "progress_bar", "persistent_manager", "warmup")
    wanted = self.generation_config if generation_config is None else generation_config
    if (mask := kwargs.pop("attention_mask", None)) is not None and not bool(torch.as_tensor(mask).all()):
        raise ValueError(
            "attention_mask has padding, which continuous batching would read as text: give lists of ids without padding"
        )
    inputs = inputs.tolist() if isinstance(inputs, torch.Tensor) else inputs
    kwargs.pop("cache_implementation", None)  # `generate` was called with "paged"
    for name in [name for name in kwargs if name not in (*call_options, "max_new_tokens")]:
        if not hasattr(wanted, name) or getattr(wanted, name) != kwargs[name]:
            raise TypeError(f"generate_batch takes no {name}: put it into generation_config, if it belongs there")
        del kwargs[name]  # `generate` wrote it into the configuration
    return original(self, "generate_batch")(inputs, generation_config, *args, **kwargs)


def _check_config(config: Any, preset: str) -> None:
    for name, allowed in _NOT_SET.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not possible on packed pages; leave it out. Steps are recorded in CUDA "
                "graphs where there is a GPU"
            )
    page_size = get_preset(preset).spec().page_size
    if config.page_size not in (256, page_size):  # 256 is transformers' default
        raise ValueError(f"page_size={config.page_size} is not that of preset {preset!r}, {page_size}; leave it out")


def _check_generation(model: Any, config: Any) -> None:
    check_values({"generation_config": config})
    check_served(_NOT_SERVED, {}, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # options that cause this warning are refused
        processors = model._get_logits_processor(config)
    for processor in processors:
        if getattr(processor, "supports_continuous_batching", None) is not True:
            raise ValueError(
                f"{type(processor).__name__} is not served: continuous batching would leave it out, or show it one token; use "
                "lb.generate_many or lb.generate"
            )


also_override(init_continuous_batching, generate_batch)
ignore_attributes(_MANAGER)
