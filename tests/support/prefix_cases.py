"""What tests of the prefix store share."""

import torch
from cases import SMALL_PAGES, Counted
from generation_cases import GREEDY

import hf_lowbit_kv as lb

DENSE = {"key_format": "dense", "value_format": "dense", **SMALL_PAGES}


def generated(model, ids, store, new=12, **options):
    """Tokens of a greedy call, how many of them came from the store, and how many of the prompt the model read."""
    options = {"max_new_tokens": new, "cache_options": DENSE, "return_dict_in_generate": True, **GREEDY, **options}
    with Counted(model) as counted:
        out = lb.generate(model, ids, "kivi-4", prefixes=store, **options)
    return out.sequences, out.past_key_values.cached_tokens, counted.tokens - (new - 1)


def text(count, seed):
    """Random ids `[1, count]`."""
    return torch.randint(3, 160, (1, count), generator=torch.Generator().manual_seed(seed))
