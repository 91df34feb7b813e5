"""One text's way down the tree as a figure: a few moments under one another, every position in the colour of its height."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..files import write_text
from ..report.colour import ramp, text_on
from ..report.text import esc
from ..rng import Draws
from ..train.run import Run, open_run
from ..tree.picture import tree_svg
from ..verbs.sample import Request, given_tokens, trace_frames
from .collect import Collection, Row

MOMENTS = 6
POSITIONS = 64
"""At most so many positions of the text are shown, from its beginning."""
WIDTH, LINE, LETTER = 1200.0, 24.0, 7.4
LONGEST = 18
"""Letters of a node's label."""


def way_down(row: Row, found: Collection, steps: int) -> tuple[Path, Path]:
    """Writes the map of the run's tree and the figure of one text (seed 0)."""
    run = open_run(row.run.folder, found.device)
    store = run.store()
    tree, trace = found.file(f"-{row.name}-tree.svg"), found.file(f"-{row.name}-trace.svg")
    write_text(tree, tree_svg(run.tree, run.tokenizer, store.counts))
    write_text(trace, trace_svg(_frames(run, steps), run.assembly.objective.tree.height))
    return tree, trace


def _frames(run: Run, steps: int) -> list[dict[str, Any]]:
    objective = run.assembly.objective
    length = run.config.data.length
    given = given_tokens(run, Request(), length)
    draws = Draws(0, 0, "sample", torch.zeros(1, dtype=torch.int64, device=objective.tree.ancestor.device))
    drawn = objective.sample(run.assembly.model, (1, length), steps=max(steps, run.tree.height), draws=draws, given=given,
                             trace=True)
    return trace_frames(drawn.frames, objective.tree.to("cpu"), run.tokenizer, given[0])


def moments(frames: list[dict[str, Any]], count: int = MOMENTS) -> list[dict[str, Any]]:
    """Frames at equal parts of the way down: by how many heights all positions together have still to go."""
    left = [sum(frame["height"]) for frame in frames]
    wanted = [left[0] * (count - 1 - step) / (count - 1) for step in range(count)]
    places = [min(range(len(frames)), key=lambda place, at=at: (abs(left[place] - at), place)) for at in wanted]
    places[-1] = len(frames) - 1
    return [frames[place] for place in dict.fromkeys(places)]


def trace_svg(frames: list[dict[str, Any]], height: int) -> str:
    colours, body, y = ramp(height, False), [], 34.0
    for frame in moments(frames):
        said = f'after {frame["evaluations"]} network evaluations'
        body.append(f'<text x="20" y="{y:.0f}" font-size="12" fill="#5b6675">{said}</text>')
        x, y = 20.0, y + 8
        for piece, level in zip(frame["pieces"][:POSITIONS], frame["height"]):
            word = _word(piece)
            wide = LETTER * len(word) + 8
            if x + wide > WIDTH - 20:
                x, y = 20.0, y + LINE
            if level:
                colour = colours[level - 1]
                fill, ink = "#{:02x}{:02x}{:02x}".format(*colour), text_on(colour)
                body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{LINE - 4:.0f}" rx="3" fill="{fill}"/>')
            else:
                ink = "#1c2430"
            body.append(f'<text x="{x + 4:.1f}" y="{y + 14:.1f}" font-size="12.5" fill="{ink}">{esc(word)}</text>')
            x += wide + 3
        y += LINE + 26
    font = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, monospace"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {y:.0f}" font-family="{font}" '
                      f'role="img" aria-label="A text from coarse to fine">',
                      f'<rect width="{WIDTH:.0f}" height="{y:.0f}" fill="#ffffff"/>',
                      *body, "</svg>\n"])


def _word(piece: str) -> str:
    """A label on one line; a space at the front is the token's own and may go, a token that is a space may not."""
    text = piece.replace("\n", "\N{RETURN SYMBOL}")
    text = text.strip() or "\N{OPEN BOX}"
    return text if len(text) <= LONGEST else text[:LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
