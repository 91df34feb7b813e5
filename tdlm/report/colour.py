"""The page's colours: CSS variables with a light and a dark value, and a sequential ramp for the heights of a tree.

The ramp runs in lightness as well as in hue, so it can be read without telling hues apart, and in grey print. Coarser
is further from the paper: darker on light paper, lighter on dark.
"""
from __future__ import annotations

LIGHT = ((0x86, 0xC8, 0xBE), (0x46, 0x9F, 0xAE), (0x2B, 0x6F, 0x9B), (0x2A, 0x45, 0x80), (0x20, 0x26, 0x54))
DARK = ((0x2A, 0x6C, 0x78), (0x37, 0x86, 0x94), (0x55, 0xA3, 0xB1), (0x82, 0xC1, 0xCB), (0xB4, 0xDD, 0xE3))

# Colour-blind safe in this order (after Okabe and Ito), with a lighter twin of each for dark paper.
SERIES = (("#0b66a8", "#6fb6ee"), ("#c2410c", "#f59a62"), ("#0a7f5c", "#4fcf9f"), ("#a3448a", "#e39acb"),
          ("#8a6500", "#e5bd4c"), ("#4b4fb5", "#a5a8f2"), ("#5d6470", "#b3bac6"), ("#7a2e2e", "#e08f8f"))


def ramp(height: int, dark: bool) -> list[tuple[int, int, int]]:
    """Colours of the heights 1..height, coarser last."""
    anchors = DARK if dark else LIGHT
    if height == 1:
        return [anchors[3]]
    colours = []
    for step in range(height):
        place = step / (height - 1) * (len(anchors) - 1)
        low = min(int(place), len(anchors) - 2)
        share = place - low
        colours.append(tuple(round(a + (b - a) * share) for a, b in zip(anchors[low], anchors[low + 1])))
    return colours


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance as WCAG defines it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_on(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever is easier to read on the colour."""
    light = luminance(colour)
    return "#fff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000"


def ramp_rules(heights: set[int]) -> str:
    """CSS: in `.ramp-H`, --h1..--hH are the colours of the heights and --t1..--tH of text on them."""
    blocks = {False: [], True: []}
    for dark, lines in blocks.items():
        for height in sorted(heights):
            items = []
            for place, colour in enumerate(ramp(height, dark), start=1):
                items.append(f"--h{place}:#{colour[0]:02x}{colour[1]:02x}{colour[2]:02x};--t{place}:{text_on(colour)}")
            lines.append(f".ramp-{height}{{{';'.join(items)}}}")
    classes = "".join(f".h{place}{{--c:var(--h{place});--t:var(--t{place})}}"
                      for place in range(1, max(heights, default=1) + 1))
    dark_lines = "".join(blocks[True])
    return f"{''.join(blocks[False])}@media screen and (prefers-color-scheme:dark){{{dark_lines}}}{classes}"


def series_rules() -> str:
    """CSS: --s0..--s7, one colour per run."""
    light, dark = (";".join(f"--s{place}:{pair[side]}" for place, pair in enumerate(SERIES)) for side in (0, 1))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
