"""Differences between the supported releases of transformers that no signature shows."""

from __future__ import annotations

import transformers

#: the installed release, e.g. (5, 24)
RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])

#: whether `generate` hands a mask to its decoding steps even if no prompt has padding. From 5.18 on it drops a mask of
#: ones. It cannot be detected before kernels are chosen, so check the version. A wrong value costs time, not correctness:
#: kernels are compiled at the first step
GENERATE_KEEPS_MASKS = RELEASE < (5, 18)
