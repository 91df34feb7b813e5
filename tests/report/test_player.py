"""The player's data are the frames, only shorter."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.report.player import player, read_trace

pieces = st.sampled_from([" he", "the, a", "\n", "</script>", "", " man"])


@st.composite
def trace_files(draw):
    positions = draw(st.integers(1, 6))
    frame = st.fixed_dictionaries(
        {
            "evaluations": st.integers(0, 99),
            "time": st.floats(0, 1),
            "height": st.lists(st.integers(0, 3), min_size=positions, max_size=positions),
            "pieces": st.lists(pieces, min_size=positions, max_size=positions),
            "moved": st.lists(st.booleans(), min_size=positions, max_size=positions),
        }
    )
    return {"frames": draw(st.lists(frame, min_size=1, max_size=5))}


def data_of(page):
    return json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[0])


@given(trace_files())
@settings(max_examples=50, deadline=None)
def test_replaying_the_changes_gives_every_frame(file):
    trace = read_trace(file, 0)
    assert trace is not None
    data = data_of(player(trace, "x"))
    positions = len(file["frames"][0]["height"])
    height, piece = [None] * positions, [None] * positions
    for frame, held in zip(file["frames"], data["frames"], strict=True):
        for place, now, text in zip(*[iter(held["c"])] * 3, strict=True):
            height[place], piece[place] = now, data["pieces"][text]
        assert height == frame["height"] and piece == frame["pieces"]
        assert held["m"] == [place for place, mark in enumerate(frame["moved"]) if mark]
    assert [data["pieces"][text] for text in data["final"]] == file["frames"][-1]["pieces"]


def test_moves_and_given_positions_are_inferred():
    frames = [
        {"evaluations": 0, "height": [2, 0, 2], "pieces": ["x", " is", "x"]},
        {"evaluations": 1, "height": [1, 0, 2], "pieces": ["a b", " is", "x"]},
    ]
    trace = read_trace({"frames": frames}, 0)
    assert trace is not None and trace.infill and trace.given == [False, True, False]
    assert trace.moved == [[False] * 3, [True, False, False]]
    explicit = read_trace({"frames": frames, "given": [True, False, False], "kind": "sample"}, 0, tree_height=4)
    assert explicit is not None and explicit.given == [True, False, False] and explicit.top == 4


def test_without_a_script_a_few_frames_stand_there():
    frames = [
        {"evaluations": step, "height": [2 - step // 10], "pieces": [f"p{step}"], "moved": [True]} for step in range(21)
    ]
    page = player(read_trace({"frames": frames}, 0), "x")  # type: ignore[arg-type]
    assert page.count("<figcaption>") == 5 and "p10" in page and '<i class="leaf moved">p20</i>' in page
    assert '<div class="live" hidden>' in page


def test_nothing_to_show():
    assert read_trace({"frames": []}, 0) is None
    assert read_trace({"frames": [{"height": [1, 2], "pieces": ["a"]}]}, 0) is None
