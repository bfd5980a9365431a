"""The soak: a small one with graphs that are stood in for, and leaks that it must see."""

from __future__ import annotations

import json

import pytest
import typer
from fake_graph import FakeGraph
from typer.testing import CliRunner

from hf_lowbit_kv.eval.benchmarks import soak
from hf_lowbit_kv.generation import recording

CALM = {"allocated": 10, "caches": 4}


def command(out, *arguments: str):
    app = typer.Typer()
    app.command()(soak.main)
    small = ["--device", "cpu", "--rounds", "3", "--steps", "18", "--caches", "6", "--tokens", "64"]
    return CliRunner().invoke(app, [*small, "--preset", "kivi-4-sink", "--out", str(out), *arguments])


@pytest.mark.usefixtures("one_thread")
def test_a_small_soak(tmp_path, monkeypatch):
    replays = []

    class Graph(FakeGraph):  # graphs are not held here: each round drops the cache of an interrupted call
        def replay(self) -> None:
            replays.append(1)
            super().replay()

    monkeypatch.setattr(recording, "graphs_for", lambda device: Graph)
    out = tmp_path / "soak.jsonl"
    done = command(out)
    assert done.exit_code == 0, done.output
    assert "nothing has grown" in done.output
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["steps"], record["caches"], record["calls"]) == (18, 6, 12)
    # calls of 2 steps, and one that is interrupted: the first warms up in both, a plain step and a fused one
    assert record["recorded"] == 16
    assert len(replays) >= 9
    assert record["left"]["caches"] == record["left"]["recordings"] == 0
    assert record["samples"]["recordings"][-1] > 0
    assert all(len(values) == 3 for values in record["samples"].values())


@pytest.mark.usefixtures("one_thread")
def test_caches_that_stay_are_seen(tmp_path, monkeypatch):
    held, use = [], soak.Soak.use_a_cache
    make = soak.lb.from_preset

    def kept(*args, **options):
        held.append(make(*args, **options))
        return held[-1]

    def leaking(self, preset, number):
        monkeypatch.setattr(soak.lb, "from_preset", kept)
        use(self, preset, number)

    monkeypatch.setattr(soak.Soak, "use_a_cache", leaking)
    done = command(tmp_path / "soak.jsonl")
    assert done.exit_code == 1
    assert "caches grew by 2, and 0 is allowed" in " ".join(done.output.split())
    assert "6 caches are left after lb.release" in " ".join(done.output.split())


def samples(values, **others):
    return [CALM | others | {"allocated": value} for value in values]


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ([1, 5, 9, 9, 9, 9], 0),  # warm-up is the first third
        ([9, 9, 9, 9, 1, 1], 0),
        ([9, 9, 3, 9, 9, 3], 0),  # up and down
        ([1, 2, 3, 4, 5, 6], 2),
        ([1, 1, 1, 1, 1, 8], 7),
        ([0, 1, 2], 1),
        ([0, 0, 0, 1, 1, 1, 1], 0),
        ([0, 0, 0, 1, 1, 2, 2], 1),
    ],
)
def test_growth(values, grown):
    assert soak.growth(samples(values)) == {"allocated": grown, "caches": 0}


def test_growth_needs_three_rounds():
    with pytest.raises(ValueError, match="samples are 2; 3 or more are needed"):
        soak.growth(samples([1, 2]))
