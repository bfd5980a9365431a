"""Says of each test what came of it as soon as it has ended: `python -m pytest -p as_they_end ...`.

A failure is printed at once, with its message. With TEST_TIMES=FILE, seconds, outcome and name of every test are added to that
file. With TEST_FAILURES=FILE, the whole report of every failure is added to that one. A run that is cut off leaves both. Works
with `-n`, too.
"""

import os
from collections import Counter

#: seconds of a test's setup and call, until its teardown is reported
_seconds: Counter[str] = Counter()
_outcomes: dict[str, str] = {}


class AsTheyEnd:
    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        _seconds[name] += report.duration
        if report.outcome != "passed":
            _outcomes[name] = report.outcome
        if report.failed:
            self._tell(f"FAILED {name} ({report.when}): {_message(report)}")
            if path := os.environ.get("TEST_FAILURES"):
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"==== {name} ({report.when})\n{report.longreprtext}\n{report.capstdout}\n")
        if report.when == "teardown" and (path := os.environ.get("TEST_TIMES")):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{_seconds.pop(name):.1f}\t{_outcomes.pop(name, 'passed')}\t{name}\n")

    def _tell(self, line):
        if (reporter := self.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.write_line(f"\n{line}")


def _message(report) -> str:
    """The error's first line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).strip().partition("\n")[0][:300]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # with -n, reports come together in one process
        config.pluginmanager.register(AsTheyEnd(config), "as_they_end_reports")
