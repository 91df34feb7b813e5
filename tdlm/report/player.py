"""The denoising trace as something to play with: from one blot per position to words.

The page holds the first state and, for each frame, what changed: a position moves at most H times, so a trace of N
steps over S positions costs S x H entries and not N x S. A few frames stand there as plain HTML too, for paper and for
a browser without scripts; the script hides them and shows the player.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .read import dicts, mapping, number
from .text import duration, esc, label, script_json, whole, words

STILLS = 5
LONGEST = 200  # characters of a label that are kept; a tooltip shows them all
NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


@dataclass(frozen=True)
class Trace:
    """One reverse process, checked: every frame has a height, a piece and a `moved` for every position."""

    title: str
    infill: bool
    prompt: str
    note: str
    evaluations: list[int]
    times: list[float | None]
    heights: list[list[int]]
    pieces: list[list[str]]
    moved: list[list[bool]]
    given: list[bool]
    top: int

    @property
    def positions(self) -> int:
        return len(self.heights[0])

    @property
    def length(self) -> int:
        return len(self.heights)


def read_trace(data: dict[str, Any], place: int, tree_height: int | None = None) -> Trace | None:
    """What trace.json says of one reverse process; None where it holds no frame."""
    heights: list[list[int]] = []
    pieces: list[list[str]] = []
    moved: list[list[bool]] = []
    evaluations: list[int] = []
    times: list[float | None] = []
    for frame in dicts(data.get("frames")):
        height = [max(0, int(number(item) or 0)) for item in frame.get("height") or []]
        piece = [_clip(item) for item in frame.get("pieces") or []]
        if not height or len(piece) != len(height) or (heights and len(height) != len(heights[0])):
            continue
        marks = frame.get("moved")
        if not isinstance(marks, list) or len(marks) != len(height):
            before = heights[-1] if heights else height
            marks = [old != new for old, new in zip(before, height)]
        heights.append(height)
        pieces.append(piece)
        moved.append([bool(mark) for mark in marks])
        evaluations.append(int(number(frame.get("evaluations")) or 0))
        times.append(number(frame.get("time")))
    if not heights:
        return None
    # A tree has dozens of heights at most; a wild number must not make dozens of thousands of colours.
    top = min(64, max(1, tree_height or 0, *(max(height) for height in heights)))
    heights = [[min(value, top) for value in height] for height in heights]
    given = _given(data, heights[0])
    infill = data.get("kind") == "infill" or (data.get("kind") is None and any(given))
    title = words(data.get("title") or ("Filling a gap" if infill else "From nothing to a text"))
    if place and not data.get("title"):
        title += f" ({place + 1})"
    prompt = data.get("prompt") if isinstance(data.get("prompt"), str) else ""
    return Trace(title, infill, str(prompt or ""), _note(data), evaluations, times, heights, pieces, moved, given, top)


def _clip(piece: Any) -> str:
    text = piece if isinstance(piece, str) else words(piece)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _given(data: dict[str, Any], first: list[int]) -> list[bool]:
    """The clamped positions: named in the file, else those that are words before the first step."""
    marks = data.get("given")
    if isinstance(marks, list) and len(marks) == len(first):
        return [bool(mark) for mark in marks]
    found = [height == 0 for height in first]
    return [False] * len(found) if all(found) else found


def _note(data: dict[str, Any]) -> str:
    settings = mapping(data.get("settings"))
    items = [f"{label(name)} {words(value)}" for name, value in settings.items() if value is not None]
    if number(data.get("seconds")) is not None:
        items.append(duration(data["seconds"]))
    return " \N{MIDDLE DOT} ".join(items)


def player(trace: Trace, name: str) -> str:
    """The player's HTML with its data; `name` makes its ids unique on the page."""
    note = f'<p class="settings">{esc(trace.note)}</p>' if trace.note else ""
    prompt = f'<p class="prompt"><b>Given:</b> {esc(trace.prompt)}</p>' if trace.prompt else ""
    return f"""<section class="player ramp-{trace.top}" id="{name}" aria-label="{esc(trace.title)}">
<h3>{esc(trace.title)}</h3>{note}{prompt}
<div class="live" hidden>
<div class="stage" role="group" aria-label="The text at this step"></div>
<div class="controls">
<div class="timeline">{_area(trace)}<div class="playhead"></div>
<input type="range" min="0" max="{trace.length - 1}" value="0" step="1" aria-label="Step of the denoising"></div>
<div class="buttons"><button type="button" class="play" aria-label="Play">Play</button>
<button type="button" class="back" aria-label="One step back">{chr(0x2039)}</button>
<button type="button" class="forward" aria-label="One step forward">{chr(0x203A)}</button>
<label>Speed <select class="speed"><option value="0.25">&frac14;&times;</option>
<option value="0.5">&frac12;&times;</option><option value="1" selected>1&times;</option>
<option value="2">2&times;</option><option value="4">4&times;</option></select></label>
<label>View <select class="view"><option value="text" selected>text</option>
<option value="grid">labels</option></select></label>
<output class="status"></output></div></div>
<p class="inspect" aria-live="polite">Point at a position (or tab into the text and use the arrow keys) to see how it
came about.</p>
</div>
{_legend(trace)}
<div class="stills">{"".join(_still(trace, place) for place in _chosen(trace.length))}</div>
<script type="application/json">{script_json(_data(trace))}</script>
</section>"""


def _chosen(length: int) -> list[int]:
    return sorted({round(place * (length - 1) / (STILLS - 1)) for place in range(STILLS)})


def _legend(trace: Trace) -> str:
    items = []
    for height in range(trace.top, 0, -1):
        if trace.top > 6 and height not in (trace.top, (trace.top + 1) // 2, 1):
            continue  # a deep tree's ramp is clear from its ends and its middle
        what = "undecided: any word" if height == trace.top else f"a group of words (height {height})"
        items.append(f'<span><i class="swatch h{height}"></i>{what}</span>')
    items.append('<span><i class="swatch leaf">word</i>decided</span>')
    items.append('<span><i class="swatch leaf moved">word</i>just moved</span>')
    if any(trace.given):
        items.append('<span><i class="swatch leaf given">word</i>given, never changes</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def _still(trace: Trace, place: int) -> str:
    """One frame as plain HTML."""
    cells = []
    for position, (height, piece) in enumerate(zip(trace.heights[place], trace.pieces[place])):
        css = f"h{height}" if height else "leaf"
        css += " moved" if trace.moved[place][position] else ""
        css += " given" if trace.given[position] else ""
        text = piece if height == 0 else piece.strip()
        if height and len(text) > 14:
            text = text[:13] + "\N{HORIZONTAL ELLIPSIS}"
        if height == trace.top:
            text = "\N{MIDDLE DOT}"
        cells.append(f'<i class="{css}">{esc(text)}</i>')
    decided = sum(height == 0 for height in trace.heights[place])
    return (f'<figure><figcaption>After {whole(trace.evaluations[place])} evaluations of the network: {decided} of '
            f'{trace.positions} positions decided</figcaption><p class="still">{"".join(cells)}</p></figure>')


def _area(trace: Trace) -> str:
    """The share of positions at each height over the frames, drawn behind the slider."""
    frames, total = trace.length, trace.positions
    last = max(1, frames - 1)
    below = [0] * frames
    shapes = []
    for height in range(1, trace.top + 1):
        counts = [sum(value == height for value in row) for row in trace.heights]
        above = [low + count for low, count in zip(below, counts)]
        if any(counts):
            upper = [f"{place / last * 1000:.1f},{100 - 100 * value / total:.1f}" for place, value in enumerate(above)]
            lower = [f"{place / last * 1000:.1f},{100 - 100 * value / total:.1f}" for place, value in enumerate(below)]
            shapes.append(f'<polygon class="h{height}" points="{" ".join(upper + lower[::-1])}"/>')
        below = above
    frame = 'class="area" viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true"'
    return f"<svg {frame}>{''.join(shapes)}</svg>"


def _data(trace: Trace) -> dict[str, Any]:
    """What the script needs: distinct pieces once, then the changes of every frame as flat triples."""
    known: dict[str, int] = {}

    def piece(text: str) -> int:
        return known.setdefault(text, len(known))

    frames = []
    heights: Sequence[int] = [-1] * trace.positions
    pieces: Sequence[str] = [""] * trace.positions
    for place in range(trace.length):
        changes: list[int] = []
        now, texts = trace.heights[place], trace.pieces[place]
        for position in range(trace.positions):
            if now[position] != heights[position] or texts[position] != pieces[position]:
                changes += [position, now[position], piece(texts[position])]
        frame = {"e": trace.evaluations[place], "t": trace.times[place], "c": changes,
                 "m": [position for position, mark in enumerate(trace.moved[place]) if mark]}
        frames.append(frame)
        heights, pieces = now, texts
    final = [piece(text) for text in trace.pieces[-1]]
    return {"frames": frames, "final": final, "words": _words(trace), "top": trace.top,
            "given": [position for position, mark in enumerate(trace.given) if mark], "pieces": list(known)}


def _words(trace: Trace) -> list[int]:
    """The positions at which a word of the final text begins: lines break there and nowhere else."""
    text = trace.pieces[-1]
    return [place for place, piece in enumerate(text)
            if place == 0 or trace.heights[-1][place] or re.match(r"\s|$", piece) or re.search(r"\s$", text[place - 1])]
