"""Ten thousand requests leak nothing: no objects, no memory, no pages."""

import gc

import psutil
import pytest
import torch
from cases import SMALL_PAGES, tiny_models

import hf_lowbit_kv as lb

REQUESTS = 10_000
#: requests between two looks at memory; the first look comes when everything has been used once
STRIDE = 2_500
#: bytes that resident memory may grow by over the last three quarters: allocators round up
MOST_GROWTH = 16e6


def requests():
    """Short texts, some of which begin alike, with limits of their own."""
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(3, 158, (40,), generator=generator).tolist()
    for number in range(REQUESTS):
        own = torch.randint(3, 158, (3 + number % 7,), generator=generator).tolist()
        yield {"input_ids": (beginning if number % 5 == 0 else []) + own, "max_new_tokens": 1 + number % 3}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kept", [False, True])
def test_ten_thousand_requests_leave_nothing(one_thread, kept):
    """kept: every text goes into a store that has room for a few, and rows read the store's pages."""
    model = tiny_models("llama")[0]
    options = {"cache_options": SMALL_PAGES, "max_rows": 32, "memory": "2MB", "progress": False, "do_sample": False}
    if kept:
        options["prefixes"] = lb.PrefixStore("200KB")
    process, looks = psutil.Process(), []
    results = lb.generate_many(model, requests(), preset="kivi-4", as_completed=True, **options)
    for number, result in enumerate(results, 1):
        assert result.finish_reason == "length", result.error
        assert len(result.generated_tokens) == 1 + result.index % 3
        if number % STRIDE == 0:
            gc.collect()
            looks.append((len(gc.get_objects()), process.memory_info().rss))
    assert number == REQUESTS
    objects, resident = zip(*looks)
    # rows at work at the moment of a look differ a little
    assert max(objects[1:]) - objects[0] < 2_000, objects
    assert resident[-1] - resident[0] < MOST_GROWTH, resident
