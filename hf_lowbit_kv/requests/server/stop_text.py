"""Texts that end an answer (`stop`) are no part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes on a text piece by piece, up to the first of some texts. What may be the beginning of one waits.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = list(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What of the text so far can be passed on, and was not."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            out, self._held = self._held[: min(places)], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def end(self) -> str:
        """The text has ended: what is left of it."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Letters at the end of what is held that may begin this text."""
        most = min(len(stop) - 1, len(self._held))
        return next((count for count in range(most, 0, -1) if stop.startswith(self._held[-count:])), 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of `stops`."""
    return StopText(stops).feed(text) if any(stop in text for stop in stops) else text
