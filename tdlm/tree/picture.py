"""A picture of a tree: its clusters as a map, and what each level asks of the model.

The map is a nested treemap of the deepest level that has at most `_CELLS` nodes (of the highest, if that has more, the
`_CELLS` most frequent ones). A cell's area grows with the square root
of how often its tokens occur (under the area itself, a few function words would push everything else off the map), its
colour says which of the first few branches it belongs to, and the words in it are its most frequent tokens. The bars on
the right show each level in nats a token: what evenly spread guesses cost (light) and what a model costs that knows the
frequencies only (dark). One self-contained SVG text without scripts.
"""
from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import torch

from .describe import Decoder, describe, show, top_tokens
from .tree import Tree

_CELLS = 640
_WIDTH, _HEIGHT = 1200, 760
_MAP = (20.0, 66.0, 920.0, 674.0)  # x, y, width, height
_GAP = "\u2002"  # an SVG text collapses ordinary spaces
_FONT = "ui-sans-serif, system-ui, 'Helvetica Neue', Arial, sans-serif"


@dataclass
class _Cell:
    node: int
    height: int
    weight: float
    branch: int
    children: list["_Cell"]


def tree_svg(tree: Tree, tokenizer: Decoder | None = None, counts: np.ndarray | None = None) -> str:
    """The picture as SVG text."""
    d = describe(tree, counts, tokenizer, examples=0)
    weight = torch.ones(tree.size, dtype=torch.float64) if counts is None else torch.as_tensor(np.asarray(counts)).double()
    if float(weight.sum()) <= 0:
        weight = torch.ones(tree.size, dtype=torch.float64)
    share = tree.mass(weight / weight.sum())
    root, number, of = _cells(tree, share)
    body: list[str] = []
    _draw(tree, root, _MAP, 0, body, weight, share, tokenizer)
    what = "tokens" if of == tree.size else "clusters"
    shown = f"{number:,} {what}" if number == of else f"the {number:,} most frequent of {of:,} {what}"
    by = "how often their tokens occur" if counts is not None else "how many tokens they hold"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="{_FONT}" role="img" aria-label="Map of the token tree">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="20" y="32" font-size="20" font-weight="600" fill="#1c2430">{d["tokens"]:,} tokens in a tree of '
        f'{d["height"]} level{"s" if d["height"] > 1 else ""}, up to {d["branching"]} children a node</text>',
        f'<text x="20" y="53" font-size="12.5" fill="#5b6675">The map shows {shown}; areas grow with the square root of '
        f'{by}; words are the most frequent tokens.</text>',
        *body, *_bars(d), "</svg>\n"])


def _cells(tree: Tree, share: torch.Tensor) -> tuple[_Cell, int, int]:
    """The tree cut where it has at most _CELLS nodes, how many cells that makes, and how many there would be."""
    cut = tree.height - 1
    while cut > 0 and len(torch.unique(tree.ancestor[cut - 1])) <= _CELLS:
        cut -= 1
    paint = tree.height - 1  # the height whose nodes get a colour each: the highest with more than a handful
    while paint > cut and len(torch.unique(tree.ancestor[paint])) < 6:
        paint -= 1
    lowest = torch.unique(tree.ancestor[cut])
    kept = set(lowest[share[lowest].argsort(descending=True, stable=True)[:_CELLS]].tolist())
    number = 0

    def make(node: int, height: int, branch: int) -> _Cell:
        nonlocal number
        kids: list[_Cell] = []
        if height > cut and node >= tree.size:
            below = tree.children[node - tree.size]
            for slot, child in enumerate(below[below >= 0].tolist()):
                if height - 1 == cut and child not in kept:
                    continue
                inherited = branch * tree.branching + slot
                kids.append(make(child, height - 1, inherited if height > paint else branch))
        number += not kids
        own = math.sqrt(max(float(share[node]), 1e-6))
        return _Cell(node, height, sum(kid.weight for kid in kids) if kids else own, branch, kids)

    return make(tree.root, tree.height, 0), number, len(lowest)


def _squarify(weights: list[float], x: float, y: float, w: float, h: float) -> list[tuple[float, float, float, float]]:
    """Rectangles with areas in proportion to the weights (largest first), as square as rows along the shorter side give."""
    out: list[tuple[float, float, float, float]] = []
    scale = w * h / sum(weights)
    areas = [weight * scale for weight in weights]
    start = 0
    while start < len(areas):
        side = min(w, h)
        end, total = start + 1, areas[start]
        while end < len(areas):
            more = total + areas[end]
            if _worst(areas[start], areas[end], more, side) > _worst(areas[start], areas[end - 1], total, side):
                break
            end, total = end + 1, more
        depth, along = total / max(side, 1e-9), 0.0
        for area in areas[start:end]:
            length = area / max(depth, 1e-9)
            out.append((x, y + along, depth, length) if w >= h else (x + along, y, length, depth))
            along += length
        x, y, w, h = (x + depth, y, w - depth, h) if w >= h else (x, y + depth, w, h - depth)
        start = end
    return out


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    """The worst ratio of sides in a row of areas between smallest and largest."""
    return max(side * side * largest / total**2, total**2 / (side * side * max(smallest, 1e-12)))


def _draw(tree: Tree, cell: _Cell, box: tuple[float, float, float, float], depth: int, body: list[str],
          weight: torch.Tensor, share: torch.Tensor, tokenizer: Decoder | None) -> None:
    x, y, w, h = box
    if not cell.children:
        _leaf(tree, cell, box, body, weight, share, tokenizer)
        return
    ordered = sorted(cell.children, key=lambda child: (-child.weight, child.node))
    gap = min(4.0, 0.12 * min(w, h)) * 0.6**depth if depth else 0.0
    inside = (x + gap / 2, y + gap / 2, max(w - gap, 0.1), max(h - gap, 0.1))
    for child, place in zip(ordered, _squarify([child.weight for child in ordered], *inside)):
        _draw(tree, child, place, depth + 1, body, weight, share, tokenizer)


def _colour(branch: int) -> str:
    """Soft colours that differ between neighbouring branches (steps of the golden angle)."""
    hue = (0.58 + branch * 0.381966) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.87 + 0.03 * (branch % 3 - 1), 0.55)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def _leaf(tree: Tree, cell: _Cell, box: tuple[float, float, float, float], body: list[str], weight: torch.Tensor,
          share: torch.Tensor, tokenizer: Decoder | None) -> None:
    x, y, w, h = box
    tokens = [cell.node] if cell.node < tree.size else top_tokens(tree, cell.node, cell.height, weight, 40)
    words = list(dict.fromkeys(_word(token, tokenizer) for token in tokens))
    title = f"node {cell.node}, {float(share[cell.node]):.2%}: " + "  ".join(words[:20])
    body.append(f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="1.5" '
                f'fill="{_colour(cell.branch)}" stroke="#ffffff" stroke-width="1"/>')
    size = min(15.0, max(6.5, math.sqrt(w * h) / 6.5))
    for number, line in enumerate(_lines(words, w - 5, h - 3, size)):
        shade = "#1c2430" if number == 0 else "#445064"
        body.append(f'<text x="{x + 3:.1f}" y="{y + 1.5 + (number + 0.85) * size * 1.16:.1f}" font-size="{size:.1f}" '
                    f'fill="{shade}">{escape(line)}</text>')
    body.append("</g>")


def _word(token: int, tokenizer: Decoder | None) -> str:
    text = show(token, tokenizer).strip("␣")
    return text if text else "␣"


def _wide(text: str, size: float) -> float:
    """A rough width of a text, generous so that words do not stick out."""
    return sum(1.05 if ord(c) > 0x2E7F else 0.32 if c in "ilj.,'!|:;" else 0.86 if c in "mwMW@%" else
               0.68 if c.isupper() else 0.56 for c in text) * size


def _lines(words: list[str], width: float, height: float, size: float) -> list[str]:
    """Words set line by line until the cell is full; a word that is too long for any line is left out."""
    room = int(height / (size * 1.16))
    lines: list[str] = []
    for word in words:
        if _wide(word, size) > width:
            continue
        if lines and _wide(lines[-1] + _GAP + word, size) <= width:
            lines[-1] += _GAP + word
        elif len(lines) < room:
            lines.append(word)
        else:
            break
    return lines


def _bars(d: dict[str, Any]) -> list[str]:
    """One pair of bars a level, the root on top."""
    x, y, width = 968.0, 84.0, 212.0
    levels = d["levels"]
    pitch = min(54.0, 600.0 / len(levels))
    top = max(max(level["uniform"] for level in levels), 1e-9)
    thick = min(16.0, pitch * (0.42 if pitch > 32 else 0.6))
    size = 11.5 if pitch > 32 else 9.5
    out = [f'<text x="{x}" y="{y}" font-size="13" font-weight="600" fill="#1c2430">Nats a token, level by level</text>']
    y += 14
    for level in levels:
        even, known = width * level["uniform"] / top, width * level["unigram"] / top
        text = f'{level["nodes"]:,} node{"s" if level["nodes"] > 1 else ""}: {level["unigram"]:.2f} of {level["uniform"]:.2f}'
        if pitch > 32:
            out.append(f'<text x="{x}" y="{y + size:.1f}" font-size="{size}" fill="#445064">{text}</text>')
        base = y + (size + 5 if pitch > 32 else 2)
        out += [f'<rect x="{x}" y="{base:.1f}" width="{max(long, 0.5):.1f}" height="{thick:.1f}" fill="{fill}">'
                f'<title>{text}</title></rect>' for long, fill in ((even, "#d5e0f2"), (known, "#3f6bb5"))]
        if pitch <= 32:
            outside = known < 34
            out.append(f'<text x="{x + (max(even, 0.5) + 4 if outside else 4):.1f}" y="{base + thick * 0.5 + size * 0.33:.1f}" '
                       f'font-size="{size}" fill="{"#445064" if outside else "#ffffff"}">{level["unigram"]:.2f}</text>')
        y += pitch
    y += 16
    for fill, text in (("#d5e0f2", f'children equally likely: {d["uniform"]:.2f} in all'),
                       ("#3f6bb5", f'frequencies known: {d["unigram"]:.2f} in all')):
        out += [f'<rect x="{x}" y="{y - 9:.1f}" width="11" height="11" fill="{fill}"/>',
                f'<text x="{x + 17}" y="{y + 1:.1f}" font-size="11.5" fill="#445064">{text}</text>']
        y += 18
    return out
