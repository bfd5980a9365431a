"""Standard errors against closed forms."""

import pytest
import torch

from hf_lowbit_kv.eval.bootstrap import block_means, error_of_mean, ratio


def test_errors_of_means_know_that_neighbours_agree():
    """Blocks of equal numbers have the error of as many numbers as there are blocks."""
    of_blocks = torch.randn(400, dtype=torch.float64)
    error = error_of_mean(of_blocks.repeat_interleave(128))
    assert error == pytest.approx(float(of_blocks.std() / 20), rel=0.1)
    assert error_of_mean(torch.randn(400 * 128, dtype=torch.float64)) < 0.2 * error
    assert error_of_mean(torch.ones(200)) == 0


def test_blocks_are_whole():
    assert block_means(torch.arange(10.0), block=4).tolist() == [1.5, 5.5]


def test_a_ratio_of_pairs_is_sharper_than_its_parts():
    """What both share cancels: for x = c y the ratio is exact, however noisy y is."""
    y = torch.rand(2, 30, dtype=torch.float64) + 0.1
    assert ratio((0.5 * y).tolist(), y.tolist()) == pytest.approx((0.5, 0.0), abs=1e-12)
    x = torch.rand(2, 30, dtype=torch.float64) + 0.1
    assert ratio(x.tolist(), y.tolist())[0] == pytest.approx(float(x.mean() / y.mean()))


def test_the_error_of_a_ratio_is_that_of_the_delta_method():
    noise = torch.randn(3, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    x, y = 2 + noise[0] + noise[2], 4 + noise[1] + noise[2]
    residue = x / 4 - y * 2 / 16
    expected = float((residue - residue.mean()).std() / 2000**0.5)
    found, error = ratio([x.tolist()], [y.tolist()])
    assert found == pytest.approx(0.5, abs=0.01)
    assert error == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([[1.0, 2.0]], [[1.0, 2.0, 3.0]]), ([], []), ([[1.0]], [[1.0]]), ([[1.0, 2.0]] * 2, [[1.0, 2.0]])],
)
def test_what_cannot_be_paired_is_refused(ours, theirs):
    with pytest.raises(ValueError, match="they must be those of the same texts, two or more of each"):
        ratio(ours, theirs)
