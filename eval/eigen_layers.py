"""Are bits shared out over layers worth it? `python -m hf_lowbit_kv.eval.eigen_layers` (10 minutes on a CPU core).

eigen-2 gives the keys of every layer the same pattern. Here each layer gets one of several patterns, with the same mean bits.
Calibration predicts what a pattern costs a layer: the sum, over channels of the transform, of the channel's variance, weighed
by the gradients of that layer, times the error that so many bits leave. The cheapest choice is measured on two essays, beside
eigen-2 with the same calibration. Records go to `eval/results/eigen-layers-smollm2.jsonl`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibrators_static import RIDGE, EigenCalibrator
from hf_lowbit_kv.eval.calibrated_rows import setting
from hf_lowbit_kv.eval.eigen import ESSAYS, START, VALUES_2, Row, measured, sources
from hf_lowbit_kv.eval.models import default_device, load_model
from hf_lowbit_kv.eval.perplexity import mean_row, position_edges, score
from hf_lowbit_kv.eval.results import append_record, provenance, results_path, run_command
from hf_lowbit_kv.formats.static import ERROR, Static

OUT = results_path("eigen-layers", "smollm2")
#: of widths that the CUDA backend reads as cheaply as those of eigen-2; bits of a group fall from the first on
PATTERNS = ("42200000", "44220000", "44222000", "44422000", "44422200", "44442200", "44442222")
UNIFORM = "44422000"


def losses(weights: torch.Tensor, covariance: torch.Tensor, patterns: Sequence[str] = PATTERNS) -> list[float]:
    """What each pattern is predicted to cost, in units that all layers share.

    Args:
        weights: sums of g g^T, g the gradient with respect to a key, float64 `[H, D, D]`. covariance: sums of x x^T, x a key
            less the mean of its page, likewise.
    """
    head_dim = weights.shape[-1]
    mean = weights.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    weights = weights + RIDGE * mean * torch.eye(head_dim, dtype=weights.dtype)
    # those of W C are those of W^1/2 C W^1/2
    sizes = torch.linalg.eigvals(weights @ covariance).real.sort(-1, descending=True).values
    error = torch.tensor([{0: 1.0, **ERROR}[bits] for bits in range(7)], dtype=sizes.dtype)
    return [float((sizes * error[Static(pattern).bits(head_dim)]).sum()) for pattern in patterns]


def share_out(costs: Mapping[int, Sequence[float]], bits: Sequence[float], mean: float) -> dict[int, int]:
    """By layer, the number of its pattern: the least total cost with at most `mean` bits a layer, up to a pattern's step.

    costs: by layer, of each pattern. bits: of each pattern. Each layer takes the least of cost + price * bits, and the price is
    raised until the bits suffice.
    """

    def chosen(price: float) -> dict[int, int]:
        return {n: min(range(len(bits)), key=lambda i: cost[i] + price * bits[i]) for n, cost in costs.items()}

    low, high = 0.0, 2 * max(max(cost) for cost in costs.values()) / min(b for b in bits if b)
    for _ in range(60):
        price = (low + high) / 2
        if sum(bits[i] for i in chosen(price).values()) > mean * len(costs):
            low = price
        else:
            high = price
    return chosen(high)


def predict(model: Any, tokenizer: Any) -> tuple[Any, dict[int, list[float]]]:
    """A calibration for all patterns, and by layer what each is predicted to cost."""
    seen: list[EigenCalibrator] = []
    fit = EigenCalibrator.fit

    def noted(self: EigenCalibrator, *inputs: Any) -> Any:
        if self not in seen:
            seen.append(self)
        return fit(self, *inputs)

    specs = [Row("", f"static-{pattern}").spec for pattern in PATTERNS]
    row = Row("")
    with mock.patch.object(EigenCalibrator, "fit", noted):  # layers are fitted in their order
        options: dict[str, Any] = {"samples": row.windows, "length": row.length}
        calibration = lb.calibrate(model, tokenizer, sources(row.texts), specs, **options)
    layers = lb.LowBitCache(model, "dense", "dense").packed_sizes
    return calibration, {n: losses(one.weights, one.covariance) for n, one in zip(layers, seen, strict=True)}


def main(
    context: Annotated[int, typer.Option(help="Tokens of each text; those from 512 on are scored.")] = 4096,
    device: Annotated[str | None, typer.Option(help="cpu, cuda [default: a GPU if there is one].")] = None,
    backend: Annotated[str | None, typer.Option(help="torch, cpu, triton [default: by device].")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Calibrate, choose, measure both on two essays, and record."""
    where = torch.device(device) if device else default_device()
    model, tokenizer = load_model(None, torch.float32, where)
    calibration, costs = predict(model, tokenizer)
    bits = [float(Static(pattern).bits(64).float().mean()) for pattern in PATTERNS]
    uniform = dict.fromkeys(costs, PATTERNS.index(UNIFORM))
    choices = {"uniform": uniform, "shared out": share_out(costs, bits, bits[PATTERNS.index(UNIFORM)])}
    factories = {}
    for name, choice in choices.items():
        per_layer = {n: {"key_format": f"static-{PATTERNS[i]}"} for n, i in choice.items() if PATTERNS[i] != UNIFORM}
        options = {"calibration": calibration, "per_layer": per_layer, "backend": backend}
        factories[name] = functools.partial(lb.from_preset, "eigen-2", model, **options)
    found = score(factories, measured(ESSAYS), model, tokenizer, context, START, progress=False, parallel=True)
    for name, choice in choices.items():
        means = mean_row(found[name], position_edges(START, context))
        del means["by_position"]
        record = {"name": name, "values": VALUES_2, "patterns": [PATTERNS[i] for i in choice.values()]}
        record["key_bits"] = sum(bits[i] for i in choice.values()) / len(choice)
        record["predicted"] = sum(costs[n][i] for n, i in choice.items()) / sum(costs[n][uniform[n]] for n in costs)
        record |= means | {"kl_by_text": {text: x.means()["kl"] for text, x in zip(ESSAYS, found[name], strict=True)}}
        append_record(out, record | setting(context, where, backend) | provenance(commit))
        counts = ", ".join(f"{n} x {pattern}" for pattern, n in sorted(Counter(record["patterns"]).items()))
        print(
            f"{name}: {record['key_bits']:.3f} bits, KL {record['kl']:.4f}, predicted {record['predicted']:.3f}; {counts}"
        )


if __name__ == "__main__":
    run_command(main)
