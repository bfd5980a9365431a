"""Low-bit KV caches for Hugging Face Transformers.

    import hf_lowbit_kv as lb
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lowbit_kv")
    cache = lb.from_preset("kivi-2", model)
    model.generate(**inputs, past_key_values=cache)

Importing the package registers the attention implementation `lowbit_kv`.
"""

from .cache.attention_function import register as _register
from .cache.cache_bytes import CacheBytes
from .cache.implementation import ATTENTION_NAME
from .cache.low_bit_cache import LowBitCache
from .cache.method_caches import IntCache, KittyCache, KIVICache, MLAFP8Cache, VecInferCache, from_preset
from .calibration.calibrate import calibrate
from .calibration_files.calibration_file import Calibration
from .doctor import doctor
from .formats import Affine, Boosted, Codebook, Dense, Format, Fp8, parse_format
from .formats.registered import register_format
from .generation.enable import disable, enable
from .generation.generate import generate, release
from .planning.fits import fits
from .presets import Preset, get_preset, preset_names, register_preset
from .prompts.chat import Chat
from .prompts.prefix_store import PrefixStore
from .requests import paged_calls as _paged_calls  # noqa: F401  adds its methods to `enable`
from .requests.generate_many import generate_many
from .requests.result import Interrupted, Result
from .storage.paged_store import LayerSpec
from .storage.transforms import Hadamard, Transform, parse_transform

__version__ = "0.1.0"

_register()

__all__ = [
    "ATTENTION_NAME",
    "Affine",
    "Boosted",
    "CacheBytes",
    "Calibration",
    "Chat",
    "Codebook",
    "Dense",
    "Format",
    "Fp8",
    "Hadamard",
    "IntCache",
    "Interrupted",
    "KIVICache",
    "KittyCache",
    "LayerSpec",
    "LowBitCache",
    "MLAFP8Cache",
    "PrefixStore",
    "Preset",
    "Result",
    "Transform",
    "VecInferCache",
    "calibrate",
    "disable",
    "doctor",
    "enable",
    "fits",
    "from_preset",
    "generate",
    "generate_many",
    "get_preset",
    "parse_format",
    "parse_transform",
    "preset_names",
    "register_format",
    "register_preset",
    "release",
]
