"""Which of the listed presets a model can use."""

from __future__ import annotations

from typing import Any

from hf_lowbit_kv.methods import from_preset
from hf_lowbit_kv.presets import preset_names


def fitting_presets(model_or_config: Any, overrides: dict[str, Any] | None = None) -> tuple[list[str], dict[str, str]]:
    """The listed presets that serve this model with these arguments of `from_preset`, and why the others do not.

    Presets for latent attention serve other models than the rest, and a calibrated preset needs its calibration.
    """
    fitting, reasons = list[str](), dict[str, str]()
    for name in preset_names():
        try:
            from_preset(name, model_or_config, **overrides or {})
        except (ValueError, TypeError) as error:
            reasons[name] = str(error)
        else:
            fitting.append(name)
    return fitting, reasons
