"""What is read again, and what is computed again: files and tensors that have changed, and nothing else."""

import time

import pytest
import torch

from hf_lowbit_kv.storage import content_digests, process_stamps


def test_a_stamp_is_trusted_once_the_clock_has_moved_on(tmp_path):
    path, reads = tmp_path / "x", []
    known = process_stamps.ReadOnce(size=2)

    def read():
        reads.append(path.read_text())
        return reads[-1]

    path.write_text("a")
    others = tmp_path / "y", tmp_path / "z"
    for other in others:
        other.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_stamps, "CLOCK_STEP", 10**15)
        assert [known.get(path, read), known.get(path, read)] == ["a", "a"]
        assert len(reads) == 2
    time.sleep(0.05)
    assert [known.get(path, read) for _ in range(3)] == ["a"] * 3
    assert len(reads) == 3
    for other in others:  # more than it keeps
        known.get(other, lambda: "")
    known.get(path, read)
    assert len(reads) == 4


def test_a_digest_tells_numbers_shapes_and_dtypes_apart():
    x = torch.arange(24, dtype=torch.float32)
    same = [x, x.clone(), x.expand(2, 24)[1], torch.stack([x, x], -1)[:, 0]]
    assert len({content_digests.digest(y) for y in same}) == 1
    other = [x + 0, x.view(4, 6), x.view(6, 4), x.view(torch.int32), x.to(torch.bfloat16), x[:1], x[0], x[:0], -x]
    assert len({content_digests.digest(y) for y in other}) == len(other)


def test_a_digest_follows_changes_in_place():
    whole = torch.zeros(4, 4)
    row, before = whole[1], content_digests.digest(whole[1])
    seen = [content_digests.digest(row)]
    whole[1, 2] = 1  # of the memory that the row lies in
    seen.append(content_digests.digest(row))
    row.data = torch.full((4,), 2.0)  # other memory
    seen.append(content_digests.digest(row))
    row.resize_(2)
    seen.append(content_digests.digest(row))
    assert seen[0] == before
    assert len(set(seen)) == 4


def test_conversions_are_remembered_until_the_tensor_changes():
    x = torch.ones(3)
    half = process_stamps.converted(x, torch.float16)
    assert process_stamps.converted(x, torch.float16) is half
    assert process_stamps.converted(x, torch.float32) is x
    x.mul_(3)
    assert process_stamps.converted(x, torch.float16).tolist() == [3, 3, 3]
    assert half.tolist() == [1, 1, 1]
