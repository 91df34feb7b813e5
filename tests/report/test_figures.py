"""Figures: what is smoothed and thinned stays true, and a missing library is one clear line."""
from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdlm.errors import ConfigError
from tdlm.report.colour import luminance, ramp, text_on
from tdlm.report.figures import Chart, Line, line_chart, series, smooth, thin


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.integers(1, 30))
def test_smoothing_is_a_mean_of_neighbours(values, window):
    got = smooth(np.array(values), window)
    for place, value in enumerate(got):
        reach = min(place, window // 2)
        assert value == pytest.approx(np.mean(values[place - reach : place + reach + 1]), abs=1e-9)


@given(st.integers(1, 300), st.integers(1, 100))
def test_thinning_keeps_the_mean(count, points):
    steps, values = np.arange(count, dtype=float), np.linspace(1, 2, count) ** 2
    few, means = thin(steps, values, points)
    assert len(few) <= max(points, min(count, points)) and len(few) == len(means) and (np.diff(few) > 0).all()
    assert means.min() >= 1 and means.max() <= 4


def test_missing_matplotlib_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'tdlm\[plot\]'"):
        line_chart(Chart("k", "t", "u", [Line("x", series(0), train=(np.arange(3.0), np.arange(3.0)))]), "p")


def test_two_figures_share_no_id_and_colours_follow_the_page():
    line = Line("$a_b$", series(1), valid=(np.arange(3.0), np.arange(3.0), np.ones(3)))
    first, second = (line_chart(Chart("k", "t", "u", [line], named=True), prefix) for prefix in ("p", "q"))
    ids = [set(re.findall(r'id="([^"]+)"', text)) for text in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    assert "var(--s1)" in first and "#050105" not in first and "$a_b$" in first
    assert first == line_chart(Chart("k", "t", "u", [line], named=True), "p")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("height", [1, 2, 3, 9, 20])
def test_the_ramp_runs_in_lightness_and_carries_text(height, dark):
    light = [luminance(colour) for colour in ramp(height, dark)]
    assert light == sorted(light, reverse=not dark)
    for colour, value in zip(ramp(height, dark), light):
        other = 1.0 if text_on(colour) == "#fff" else 0.0
        assert (max(value, other) + 0.05) / (min(value, other) + 0.05) >= 4.5
