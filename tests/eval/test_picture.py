"""The picture of bits and KL: which points no other beats, and where names stand."""

from __future__ import annotations

import itertools

import pytest

from hf_lowbit_kv.eval.preset_search import draw, pareto, plot


def test_what_no_other_beats():
    points = [(2.0, 0.5), (2.5, 0.1), (3.0, 0.2), (2.0, 0.6), (4.0, 0.1)]
    rows = [{"bits_per_value": bits, "kl": kl} for bits, kl in points]
    assert pareto(rows) == [True, True, False, False, False]


def test_names_in_the_picture_stand_clear_of_points_and_of_each_other():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    places = [(2.0 + 0.02 * (i % 4), 0.1 * (1 + i // 4)) for i in range(12)] + [(4.0, 0.01), (8.0, 0.001)]
    rows = [{"preset": f"name-{i}", "bits_per_value": bits, "kl": kl} for i, (bits, kl) in enumerate(places)]
    axes = Figure(figsize=(7.5, 4.5), layout="constrained").subplots()
    draw(axes, rows, "crowded")
    named = [text for text in axes.texts if text.get_text()]
    assert {"name-12", "name-13"} <= {text.get_text() for text in named}  # there is room for these
    boxes = [Text.get_window_extent(text) for text in named]
    points = axes.transData.transform(places)
    assert not any(box.contains(x, y) for box in boxes for x, y in points)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    far = [text for text in named if abs(text.get_position()[0]) >= 12]
    assert len([text for text in axes.texts if not text.get_text()]) == len(far) > 0  # joined to their points


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tiny.png"
    plot(
        [{"preset": "a", "bits_per_value": 2.0, "kl": 0.5}, {"preset": "b", "bits_per_value": 4.0, "kl": 0.1}],
        picture,
        "tiny",
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
