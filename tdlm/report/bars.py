"""Horizontal bars in plain HTML: they stretch to any screen, print, and can be read aloud row by row."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .text import esc, plus_minus


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    error: float = 0.0
    css: str = ""
    text: str = ""
    link: str = ""


def bars(rows: Sequence[Bar], *, caption: str, digits: int = 3) -> str:
    """One bar a row from zero, with a whisker of one standard error to each side."""
    top = max((row.value + row.error for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        width = 100 * max(row.value, 0.0) / top
        whisker = ""
        if row.error:
            left = 100 * max(row.value - row.error, 0.0) / top
            whisker = f'<i class="whisker" style="left:{left:.3f}%;width:{200 * row.error / top:.3f}%"></i>'
        text = esc(row.text or plus_minus(row.value, row.error, digits))
        value = f'<a href="#{esc(row.link)}">{text}</a>' if row.link else text
        fill = f'<i class="fill" style="width:{width:.3f}%"></i>'
        lines.append(f'<div class="bar {row.css}" role="row">'
                     f'<span class="name" role="rowheader">{esc(row.label)}</span>'
                     f'<span class="track" aria-hidden="true">{fill}{whisker}</span>'
                     f'<span class="value" role="cell">{value}</span></div>')
    return (f'<figure class="bars"><figcaption>{caption}</figcaption><div role="table" aria-label="{esc(caption)}">'
            f'{"".join(lines)}</div></figure>')
