"""Damage to files: what may happen to their bytes."""

from hypothesis import HealthCheck
from hypothesis import strategies as st

#: of every fuzz test: the same cases in every run, no time limit for one, and nothing written
FUZZ = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@st.composite
def changes(draw):
    """A function that damages bytes: it cuts them, or flips, inserts, removes or replaces some."""
    where, some = draw(st.integers(0, 10**5)), draw(st.binary(min_size=1, max_size=200))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "remove", "replace", "all"]))

    def change(data: bytes) -> bytes:
        at = where % len(data)
        match kind:
            case "cut":
                return data[:at]
            case "flip":
                return data[:at] + bytes([data[at] ^ (some[0] or 1)]) + data[at + 1 :]
            case "insert":
                return data[:at] + some + data[at:]
            case "remove":
                return data[:at] + data[at + len(some) :]
            case "replace":
                return data[:at] + some + data[at + len(some) :]
        return some

    return change
