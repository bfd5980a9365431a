"""What differs between the supported releases of transformers, as far as no signature tells it."""

from __future__ import annotations

import transformers

#: the installed release, e.g. (5, 24)
RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])

#: whether `generate` hands a mask to its decoding steps even if no prompt has padding. From 5.18 on it drops a mask of
#: ones. Only the steps show it, after kernels have been chosen for them, and a call of `generate` to find out would take
#: a model; so the release is asked. A wrong value costs time, not correctness: kernels are compiled at the first step
GENERATE_KEEPS_MASKS = RELEASE < (5, 18)
