"""Tensor parallelism, measured: `torchrun --nproc-per-node N -m hf_lowbit_kv.eval.benchmarks.parallel`.

A model with random weights is loaded with tensor parallelism: each rank has a part of the weights and some of the KV
heads. N = 1 gives the figures to compare with. Two shapes: `llama-8b` and `llama-70b`, cut to the layers that fit.

First texts are compared. All ranks must write the same tokens. With N = 1, `--reference FOLDER` keeps the tokens and
logits of one GPU. With more GPUs, it compares with them. A row is equal, or one GPU's logits at the first different
token are a near-tie (`contenders.near_tie`). Otherwise the comparison fails, and nothing is timed. Then caches are filled
with random keys and values, and decode steps are timed as in `bench_generate.py`.

- `step_ms`: median time of a step of `generate` on rank 0. `tokens_per_second`: tokens of all rows together.
- `nbytes`: allocated bytes of the cache on each rank. `peak_bytes`: the allocator's peak in a step on each rank.
- `mode`: `eager` or `recorded`. `why_eager`: why steps could not be recorded and ran eagerly.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks.contenders import HEADROOM, BatchSize, Contender, make, near_tie
from hf_lowbit_kv.eval.benchmarks.random_models import PeakMemory, count_weights, llama_8b
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Out, PresetNames, Run
from hf_lowbit_kv.eval.data_parallel import Processes, join, leave
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.generation import recording

PRESETS = ("dense", "int8", "kivi-4-sink", "kivi-2", "eigen-2")
MODES = ("eager", "recorded")
#: rows x attended tokens
CASES = ("1x131072", "8x32768")
#: most bytes of weights on a GPU before they are split, because each rank makes all weights, then keeps its part
WEIGHTS_LIMIT = 50e9
#: size of the compared text: rows, tokens of the prompt, new tokens
TEXT = (2, 1500, 32)


class TextsDifferError(RuntimeError):
    """Ranks write different texts, or several GPUs and one GPU do, so nothing was timed."""


# ---- the model --------------------------------------------------------------------------------------------------------


def llama_70b(layers: int = 80) -> LlamaConfig:
    """A configuration of the shape of Llama 3.1 70B."""
    return llama_8b(layers, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)


def tiny(layers: int = 2) -> LlamaConfig:
    """A shape for a dry run on a CPU, with four KV heads."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}
    return llama_8b(tiny=True, **sizes)


SHAPES = {"llama-8b": llama_8b, "llama-70b": llama_70b, "tiny": tiny}


def fitting_layers(shape: str) -> int:
    """How many layers of the shape fit into `WEIGHTS_LIMIT` in 16 bits, at most those of the model."""
    full, none, one = (count_weights(SHAPES[shape](*layers)) for layers in ((), (0,), (1,)))
    per_layer = one - none
    return int(min((full - none) // per_layer, (WEIGHTS_LIMIT / 2 - none) // per_layer))


def split_model(config: LlamaConfig, processes: Processes, device: torch.device, seed: int = 0) -> Any:
    """A model with random weights, split over the processes. The weights are the same for any number of processes."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, weight in empty.state_dict().items():
        random = torch.empty(weight.shape, dtype=dtype, device=device)
        weights[name] = random.fill_(1) if weight.dim() == 1 else random.normal_(0, 0.02, generator=generator)
    split = {} if processes.count == 1 else {"distributed_config": DistributedConfig(processes.count, "auto")}
    # without a name, transformers takes the weights from `state_dict`, and keeps this rank's part of each weight
    model = type(empty).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, attn_implementation=lb.ATTENTION_NAME, **split
    )
    if split:  # each part is a view of the whole weight, which it would keep in memory
        for weight in model.parameters():
            if hasattr(weight, "to_local"):
                weight._local_tensor = weight.to_local().clone()
    else:
        model = model.to(device)
    model.generation_config.eos_token_id = None
    return model.eval()


# ---- texts ------------------------------------------------------------------------------------------------------------


def written(preset: str, model: Any) -> dict[str, torch.Tensor]:
    """Tokens `[rows, new]` that follow a random prompt, and their logits `[rows, new, vocabulary]`, on the CPU."""
    rows, tokens, new = TEXT
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))
    contender = make(preset, "recorded", model, rows, tokens + new)
    out = contender.generate(ids.to(model.device), new, return_dict_in_generate=True, output_logits=True)
    return {"tokens": out.sequences[:, tokens:].cpu(), "logits": torch.stack(out.logits, 1).float().cpu()}


def compared(results: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many rows equal the reference, and how many differ from it at a near-tie.

    Raises:
        TextsDifferError: a row differs at a token that is no near-tie.
    """
    equal = 0
    for row, (ours, theirs) in enumerate(zip(results["tokens"], reference["tokens"], strict=True)):
        if torch.equal(ours, theirs):
            equal += 1
            continue
        step = int((ours != theirs).nonzero()[0])
        if not near_tie(reference["logits"][row, step], results["logits"][row, step]):
            raise TextsDifferError(
                f"token {step} of row {row} is {int(ours[step])}; on one GPU it is {int(theirs[step])}"
            )
    return {"rows_equal": equal, "rows_near_tie": len(results["tokens"]) - equal}


def check_texts(preset: str, model: Any, processes: Processes, reference: Path | None) -> dict[str, Any]:
    """Compare the texts of all ranks with each other, and with those of one GPU."""
    results = written(preset, model)
    everyone = processes.gather([results["tokens"].tolist()])
    if any(tokens != everyone[0] for tokens in everyone):
        raise TextsDifferError(f"{preset}: ranks do not write the same tokens: {everyone}")
    result: dict[str, Any] = {"ranks_equal": True, "text": list(TEXT)}
    if reference is None:
        return result
    path = reference / f"{preset}.pt"
    if processes.count == 1:
        reference.mkdir(parents=True, exist_ok=True)
        torch.save(results, path)
        return result
    return result | compared(results, torch.load(path))


# ---- steps ------------------------------------------------------------------------------------------------------------


def timed(contender: Contender, processes: Processes, steps: int, rounds: int) -> dict[str, Any]:
    """Time of a step, and bytes on each rank."""
    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contender.steps_ms(2)  # loads kernels, and records the step
        reasons += [str(each.message) for each in caught if "cannot be recorded" in str(each.message)]
    if contender.mode == "recorded" and recording.graphs_for(contender.model.device) is None:
        reasons.append(f"a device of type {contender.model.device.type!r} has no graphs")
    samples = [ms for _ in range(rounds) for ms in contender.steps_ms(steps)]
    with PeakMemory(contender.model.device) as peak:
        contender.steps_ms(2)
    weights = sum(_local(weight).nbytes for weight in contender.model.parameters())
    growth = None if peak.growth is None else peak.before + peak.growth
    step = statistics.median(samples)
    return {
        "step_ms": step,
        "tokens_per_second": contender.batch / step * 1e3,
        "nbytes": processes.gather([contender.allocated_bytes()]),
        "weight_bytes": processes.gather([weights]),
        "peak_bytes": processes.gather([growth]),
        "why_eager": reasons[0] if reasons else None,
    }


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(SHAPES)}.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model [default: as many as fit].")] = None,
    preset: PresetNames = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(MODES)}.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help=f"ROWSxTOKENS, repeatable [default: {', '.join(CASES)}].")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="Folder with texts of one GPU; N = 1 writes it.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a sample.")] = 16,
    rounds: Annotated[int, typer.Option(help="Samples.")] = 3,
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Compare texts, then time decode steps; rank 0 appends a JSON line for each preset, mode and case."""
    cases = [BatchSize.parse(text) for text in case or CASES]
    modes, shapes = mode or list(MODES), shape or ["llama-8b", "llama-70b"]
    for name, allowed in [*((x, SHAPES) for x in shapes), *((x, MODES) for x in modes)]:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is not known; allowed: {', '.join(allowed)}")
    processes = join()
    device = processes.device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    run = Run("parallel", str(device), commit, out, ranks=processes.count)
    for name in shapes:
        count = fitting_layers(name) if layers is None else layers
        model = split_model(SHAPES[name](count), processes, device)
        run.common |= {"shape": name, "layers": count, "dtype": str(model.dtype).removeprefix("torch.")}
        for each in preset or PRESETS:
            try:
                texts = check_texts(each, model, processes, reference and reference / name)
            except TextsDifferError as error:
                run.faults.append(f"{name} {each}: {error}")
                continue
            for step_mode, size in itertools.product(modes, cases):
                contender = make(each, step_mode, model, size.batch, size.tokens + HEADROOM)
                contender.kv_heads = model.config.num_key_value_heads // processes.count
                contender.fill(size.tokens)
                times = timed(contender, processes, steps, rounds)
                if processes.is_first:
                    of_case = {"preset": each, "mode": step_mode, "batch": size.batch, "tokens": size.tokens}
                    run.add(of_case | texts | times)
                del contender
        lb.release(model)
        del model
        gc.collect()
    leave()
    if processes.is_first:
        times_shown = "step_ms:.2f", "tokens_per_second:.1f", "nbytes", "why_eager"
        run.end("shape", "layers", "preset", "mode", "batch", "tokens", *times_shown, "rows_equal", "rows_near_tie")
    elif run.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
