"""CPU seconds of each test file, those of processes that it starts included: `python -m pytest -p cpu_time ...`.

Other work on the machine changes them little, unlike `--durations`. Works with `-n`, too. A process counts when somebody has
waited for it, as `subprocess.run` does. What a process spends on imports and collection is one line of the table.
"""

import os
from collections import Counter

import pytest

#: lines of the table
MOST_FILES = 60
MOST_TESTS = 40
NAME = "cpu_seconds"
COLLECTION = "imports and collection"

_seconds_before = 0.0
_by_file: Counter[str] = Counter()
_by_test: Counter[str] = Counter()


def _spent() -> float:
    """User and system time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def _since_last_time() -> float:
    global _seconds_before
    now = _spent()
    seconds, _seconds_before = now - _seconds_before, now
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "setup" and not hasattr(item.session, "collection_counted"):
        # the first setup of a process comes along; it is short beside the imports
        item.session.collection_counted = True
        report.user_properties = [*report.user_properties, (COLLECTION, _since_last_time())]
    else:
        report.user_properties = [*report.user_properties, (NAME, _since_last_time())]
    return report


def pytest_runtest_logreport(report):
    for name, seconds in report.user_properties:
        if name == COLLECTION:
            _by_file[COLLECTION] += seconds
        elif name == NAME:
            _by_file[report.nodeid.split("::")[0]] += seconds
            _by_test[report.nodeid] += seconds


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section(f"{sum(_by_file.values()):.0f} CPU seconds")
    for name, seconds in [*_by_file.most_common(MOST_FILES), *_by_test.most_common(MOST_TESTS)]:
        terminalreporter.write_line(f"{seconds:8.1f} {name}")
