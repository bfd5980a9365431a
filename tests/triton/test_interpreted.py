"""Triton's kernels in its interpreter, where no GPU is: the small cases of the files that test kernels.

One set of processes for all of them: starting one, with all that it imports, costs more than most cases.
"""

import re
from pathlib import Path

import kernel_checks as kernels
import pytest
from interpreted import PARTS, run_part

TESTS = Path(__file__).parents[1]
#: it takes minutes, and has a slow test of its own
ELSEWHERE = ("test_isolation",)
FILES = [
    str(path)
    for path in sorted(TESTS.rglob("test_*.py"))
    if re.search(r"^def test_small", path.read_text(encoding="utf-8"), re.MULTILINE) and path.stem not in ELSEWHERE
]


@pytest.mark.begins_first
@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the tests themselves run here")
@pytest.mark.timeout(1800)
def test_interpreted():
    run_part(FILES, part=0, parts=1)


@pytest.mark.begins_first
@pytest.mark.slow
@pytest.mark.skipif(kernels.GPU or kernels.INTERPRETED, reason="the tests themselves run here")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_slow_ones_interpreted(part):
    run_part(FILES, part, slow=True)


def test_every_file_of_kernels_has_small_cases():
    names = {Path(file).name for file in FILES}
    assert {
        *("test_kernels.py", "test_prompt.py", "test_triton_latent.py", "test_fused.py", "test_fusing.py"),
        "test_new_format.py",
    } <= names
