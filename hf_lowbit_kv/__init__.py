"""Low-bit KV caches for Hugging Face Transformers.

    import hf_lowbit_kv as lb
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lowbit_kv")
    cache = lb.from_preset("kivi-2", model)
    model.generate(**inputs, past_key_values=cache)

Importing the package makes the attention implementation `lowbit_kv` known to transformers. It imports neither torch nor
transformers: a public name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .cache.registration import register_with_transformers as _register_with_transformers

__version__ = "0.1.0"

# the same names as in `_MODULES`: type checkers and editors read these lines, and Python does not run them
if TYPE_CHECKING:
    from .cache.cache_bytes import CacheBytes as CacheBytes
    from .cache.implementation import ATTENTION_NAME as ATTENTION_NAME
    from .cache.low_bit_cache import LowBitCache as LowBitCache
    from .cache.method_caches import IntCache as IntCache
    from .cache.method_caches import KittyCache as KittyCache
    from .cache.method_caches import KIVICache as KIVICache
    from .cache.method_caches import MLAFP8Cache as MLAFP8Cache
    from .cache.method_caches import VecInferCache as VecInferCache
    from .cache.prefix_store import PrefixStore as PrefixStore
    from .cache.preset_cache import from_preset as from_preset
    from .calibration.calibrate import calibrate as calibrate
    from .calibration_files.calibration_file import Calibration as Calibration
    from .diagnosis import doctor as doctor
    from .formats import Affine as Affine
    from .formats import Boosted as Boosted
    from .formats import Codebook as Codebook
    from .formats import Dense as Dense
    from .formats import Format as Format
    from .formats import Fp8 as Fp8
    from .formats import parse_format as parse_format
    from .formats.registered import register_format as register_format
    from .generation.generate import generate as generate
    from .generation.generate import release as release
    from .planning.fits import fits as fits
    from .presets import Preset as Preset
    from .presets import get_preset as get_preset
    from .presets import preset_names as preset_names
    from .presets import register_preset as register_preset
    from .prompts.chat import Chat as Chat
    from .requests.generate_many import generate_many as generate_many
    from .requests.paged_calls import disable as disable
    from .requests.paged_calls import enable as enable
    from .requests.result import Interrupted as Interrupted
    from .requests.result import Result as Result
    from .storage.layer_spec import LayerSpec as LayerSpec
    from .storage.transforms import Hadamard as Hadamard
    from .storage.transforms import Transform as Transform
    from .storage.transforms import parse_transform as parse_transform

#: public name -> the module of this package that has it
_MODULES = {
    "ATTENTION_NAME": "cache.implementation",
    "Affine": "formats",
    "Boosted": "formats",
    "CacheBytes": "cache.cache_bytes",
    "Calibration": "calibration_files.calibration_file",
    "Chat": "prompts.chat",
    "Codebook": "formats",
    "Dense": "formats",
    "Format": "formats",
    "Fp8": "formats",
    "Hadamard": "storage.transforms",
    "IntCache": "cache.method_caches",
    "Interrupted": "requests.result",
    "KIVICache": "cache.method_caches",
    "KittyCache": "cache.method_caches",
    "LayerSpec": "storage.layer_spec",
    "LowBitCache": "cache.low_bit_cache",
    "MLAFP8Cache": "cache.method_caches",
    "PrefixStore": "cache.prefix_store",
    "Preset": "presets",
    "Result": "requests.result",
    "Transform": "storage.transforms",
    "VecInferCache": "cache.method_caches",
    "calibrate": "calibration.calibrate",
    "disable": "requests.paged_calls",
    "doctor": "diagnosis",
    "enable": "requests.paged_calls",
    "fits": "planning.fits",
    "from_preset": "cache.preset_cache",
    "generate": "generation.generate",
    "generate_many": "requests.generate_many",
    "get_preset": "presets",
    "parse_format": "formats",
    "parse_transform": "storage.transforms",
    "preset_names": "presets",
    "register_format": "formats.registered",
    "register_preset": "presets",
    "release": "generation.generate",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # type checkers would accept every name of a module that has this function

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value  # from here on Python finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


_register_with_transformers()
