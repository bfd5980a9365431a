"""Cases of a parametrized test that have a mark: of a long list some are in every run, and all are in `make test-all`."""

import pytest


def slow_case(*values):
    """A case with these values that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def newest_case(*values):
    """Of a test that is marked `host`: a case that `make test` runs on the newest transformers only."""
    return pytest.param(*values, marks=pytest.mark.newest)
