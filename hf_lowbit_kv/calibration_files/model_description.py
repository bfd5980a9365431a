"""Descriptions of models in calibrations, and differences between descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import weight_sums

#: number of values of its embedding that identify a model; allowed difference, relative to their root mean square
MARKS, TOLERANCE = 64, 0.02
#: how a user accepts a calibration of other weights
ACCEPTING = "calibrate these weights (a fine-tune, adapters), or accept the loss with allow_other_weights=True"


def describe_model(model_or_config: Any, layers: Mapping[int, tuple[int | None, ...]]) -> dict[str, Any]:
    """A description that identifies a model.

    Args:
        layers: by packed layer, the number of KV heads and the sizes of keys and values.

    Returns:
        `name`, `model_type` and `layers` (index -> heads, sizes). With weights also `marks`, values of the embedding, and
        `weights`, sums of attention weights (`weight_sums`). `unread` is the reason why some weights are missing.
    """
    config = getattr(model_or_config, "config", model_or_config)
    config = config.get_text_config(decoder=True)
    name = getattr(config, "_name_or_path", "") or config.model_type
    out: dict[str, Any] = {
        "name": Path(name).name,
        "model_type": config.model_type,
        "layers": {str(index): list(sizes) for index, sizes in layers.items()},
    }
    if hasattr(model_or_config, "get_input_embeddings"):
        weight = model_or_config.get_input_embeddings().weight
        if type(weight) in (torch.Tensor, torch.nn.Parameter) and not weight.is_meta and weight.dim() == 2:
            rows = torch.linspace(1, weight.shape[0] - 1, MARKS, dtype=torch.float64).long()
            columns = torch.arange(MARKS) * 7 % weight.shape[1]
            marks = weight.detach()[rows.to(weight.device), columns.to(weight.device)]
            out["marks"] = [float(f"{x:.4g}") for x in marks.float().tolist()]
        sums = weight_sums.weight_sums(model_or_config, layers)
        out |= {"weights": sums.sums} | ({} if sums.unread is None else {"unread": sums.unread})
    return out


class MadeFor(NamedTuple):
    """The description of a calibration's model, and where the calibration comes from, for messages."""

    model: Mapping[str, Any]
    source: str

    def check(self, model: Mapping[str, Any], allow_other_weights: bool = False) -> None:
        """Raise `ValueError` if the calibration was not made for `model` (`describe_model`).

        Args:
            allow_other_weights: whether other weights of the same sizes are accepted.
        """
        if (reason := difference(self.model, model, allow_other_weights)) is None:
            return
        other = "another model" if difference(self.model, model, other_weights=True) else "other weights"
        raise ValueError(
            f"{self.source} was made for {other} ({self.model['name']}): {reason}"
            + (f"; {ACCEPTING}" if other == "other weights" else "")
        )


def difference(made_for: Mapping[str, Any], model: Mapping[str, Any], other_weights: bool = False) -> str | None:
    """The first difference between two descriptions of models, or `None`. other_weights: weights may differ."""
    for key in ("model_type", "layers"):
        if made_for[key] != model[key]:
            ours, theirs = (_sizes(each[key]) if key == "layers" else each[key] for each in (made_for, model))
            return f"{key} {ours}, but the model has {theirs}"
    return None if other_weights else weights_difference(made_for, model)


def weights_difference(made_for: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The first difference between the weights of two models of the same sizes, or `None`."""
    return marks_difference(made_for, model) or weight_sums.difference(
        made_for.get("weights") or {}, model.get("weights") or {}
    )


def marks_difference(made_for: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The first difference between embeddings, or `None`."""
    if "marks" in made_for and "marks" in model:
        a, b = (torch.tensor(x["marks"], dtype=torch.float64) for x in (made_for, model))
        if a.shape != b.shape or not bool((a - b).abs().max() <= TOLERANCE * a.square().mean().sqrt() + 1e-12):
            return "the sizes agree, but the weights of the embedding do not"
    return None


def _sizes(layers: Mapping[str, list[int]]) -> str:
    kinds = sorted(
        {f"{heads} KV heads of {'/'.join(map(str, dict.fromkeys(dims)))}" for heads, *dims in layers.values()}
    )
    return f"{len(layers)} with {', '.join(kinds)}"
