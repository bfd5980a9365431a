"""What `crop` must know of padding, against all masks side by side."""

import pytest
import torch

from hf_lowbit_kv.cache.token_counts import BLOCK, Padding


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("seed", range(10))
def test_random_passes(seed, on_device):
    gen = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=gen))

    padding, real = Padding(), torch.ones(3, 0, dtype=torch.bool)
    for _ in range(400):
        what, end = draw(20), real.shape[1]
        if what == 0 and end:
            count = draw(min(end, 40)) + 1
            wanted = real[:, end - count :].sum(1, keepdim=True)
            assert torch.equal(torch.as_tensor(padding.real_among_last(count, end)).expand(3, 1), wanted)
            padding.cut(end - count)
            real = real[:, : end - count]
        elif what == 1:
            rows = torch.randint(3, (3,), generator=gen)
            padding.select(rows)
            real = real[rows]
        else:
            tokens = draw(5) if what == 2 else 1
            mask = torch.rand(3, tokens, generator=gen) < 0.6
            if what == 3:
                mask = torch.ones_like(mask)  # a pass without a mask
            else:
                padding.note(torch.tensor(end) if on_device and tokens == 1 else end, mask)
            real = torch.cat([real, mask], dim=1)


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_masks_of_single_tokens_are_put_together(on_device):
    padding = Padding()
    for token in range(10 * BLOCK):
        padding.note(token, torch.ones(2, 1, dtype=torch.bool))
    assert len(padding._noted) == 10
    for token in range(10 * BLOCK, 10 * BLOCK + 50):  # beams: rows are chosen in every step
        padding.note(token, torch.ones(2, 1, dtype=torch.bool))
        padding.select(torch.tensor([1, 0]))
        assert len(padding._noted) == 1
    for token in range(10 * BLOCK + 50, 15 * BLOCK):
        padding.note(torch.tensor(token) if on_device else token, torch.ones(2, 1, dtype=torch.bool))
        padding.select(torch.tensor([1, 0]))
        assert len(padding._noted) <= (BLOCK + 1 if on_device else 1)
