"""How many calls of this package's Python functions a decode step makes: `python tests/support/python_calls.py` prints them.

The step is one of a tiny model on a CPU, eager, on a growing cache.
"""

import collections
import sys
from pathlib import Path

import torch
from cases import filled, tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

_PACKAGE = str(Path(lb.__file__).parent)


def calls_of_a_step(steps: int = 8, **options) -> dict[str, float]:
    """By function, its calls per decode step, averaged over `steps` steps in which no page is added. options: of the cache."""
    model, _ = tiny_models("llama")
    cache, counts = filled(model, **options), collections.Counter[str]()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            path = frame.f_code.co_filename.removeprefix(_PACKAGE + "/")
            counts[f"{path}: {frame.f_code.co_qualname}"] += 1

    def step():
        with torch.no_grad():
            model(torch.tensor([[5]]), **as_argument(cache))

    step()
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return {name: number / steps for name, number in counts.most_common()}


if __name__ == "__main__":
    for kind in ({}, {"max_cache_len": 200}):
        calls = calls_of_a_step(**kind)
        print(f"{sum(calls.values()):g} calls for two layers", kind or "growing")
        for name, number in calls.items():
            print(f"{number:8g}  {name}")
