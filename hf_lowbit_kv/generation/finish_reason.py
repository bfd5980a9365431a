"""Why a text ended: the names in `Result` and `Chat`."""

from __future__ import annotations

from typing import Literal

FinishReason = Literal["stop", "length", "error", "cancelled"]
