"""What a cache knows about its text, which ends with the text and is a row's own where rows differ."""

import pytest
import torch
from cases import filled

from hf_lowbit_kv.cache.text_facts import TextFacts

ENDS = {"reset": lambda cache: cache.reset(), "crop": lambda cache: cache.crop(-80)}


@pytest.mark.parametrize("max_cache_len", [None, 200])
@pytest.mark.parametrize("end", ENDS)
def test_facts_end_with_the_text(model, end, max_cache_len):
    """Every one, also those that are added later."""
    cache = filled(model, max_cache_len=max_cache_len)
    facts = cache.facts
    cache.text = torch.ones(1, 80, dtype=torch.int64)
    facts.warned, facts.positions.values = True, {"model.rope_deltas": torch.ones(1, 1)}
    empty = vars(TextFacts()) | {"positions": None}
    differ = {name for name, value in vars(facts).items() if name != "read_lengths" and value is not empty[name]}
    assert differ == empty.keys() - {"read_lengths"}
    ENDS[end](cache)
    assert vars(cache.facts) | {"positions": cache.positions.values} == empty
    assert all(layer.facts is cache.facts for layer in cache.packed_layers)


def test_facts_of_a_fork_are_its_own(model):
    cache = filled(model)
    cache.text = torch.arange(80)[None]
    (fork,) = cache.fork()
    fork.crop(-40)
    assert fork.text.tolist() == [list(range(40))]
    assert cache.text.tolist() == [list(range(80))]
    fork.reset()
    assert fork.facts.filled_by is None
    assert cache.facts.filled_by is not None
    assert fork.packed_layers[0].facts is fork.facts
