"""A run folder that looks like a real one, made from a few lines of old prose; also what the page is developed against.

python tests/report/fake_run.py FOLDER        (then write_report([FOLDER], FOLDER / "report.html"))
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Robert Louis Stevenson, Treasure Island (1883): in the public domain.
PROSE = """I remember him as if it were yesterday, as he came plodding to the inn door, his sea-chest following
behind him in a hand-barrow; a tall, strong, heavy, nut-brown man; his tarry pigtail falling over the shoulders of his
soiled blue coat; his hands ragged and scarred, with black, broken nails; and the sabre cut across one cheek, a dirty,
livid white. | I remember him looking round the cove and whistling to himself as he did so, and then breaking out in
that old sea-song that he sang so often afterwards.""".replace("\n", " ").replace(" | ", "\n")

GROUPS = {
    "he, him, his, it, I": "he him his it I himself they we you she her",
    "the, a, that, one": "the a an that one this some no",
    "and, as, if, or": "and as if or but then so when while",
    "in, of, to, over": "in of to over by with on at behind across round out",
    "was, were, had, did": "was were had did came cut sang be is been remember",
    ", . ; -": ", . ; -",
    "old, tall, black, great": "old tall strong heavy black broken dirty livid white blue brown soiled ragged tarry",
    "man, sea, door, hand": "man sea door hand hands inn chest coat shoulders nails cheek cove song pigtail",
}


def tokens(text: str) -> list[str]:
    """Words with their space in front, long ones in two pieces, as a BPE would have them."""
    found: list[str] = []
    for piece in re.findall(r"\n| ?\w+| ?[^\w\s]", text):
        cut = len(piece) - 3 if len(piece) > 8 else len(piece)
        found += [part for part in (piece[:cut], piece[cut:]) if part]
    return found


def group(piece: str) -> str:
    if piece == "\n":
        return "\u21b5"
    for name, members in GROUPS.items():
        if piece.strip(" ") in members.split():
            return name
    return "looking, falling, often, following" if piece.startswith(" ") else "ing, ed, ly, s"


def frames(pieces: list[str], *, steps: int, height: int, given: list[bool], seed: int = 0) -> list[dict[str, Any]]:
    """Positions move one height down at a time, each level in its own part of the steps."""
    generator = np.random.default_rng(seed)
    moves = generator.uniform(size=(height, len(pieces)))
    state = np.where(given, 0, height)
    made = []
    for step in range(steps + 1):
        progress = step / steps * height
        wanted = height - (moves + np.arange(height)[:, None] < progress).sum(0)
        now = np.where(given, 0, wanted if step < steps else 0)
        labels = [
            piece if h == 0 else "the, and, of, to" if h == height else _coarser(group(piece), h)
            for piece, h in zip(pieces, now)
        ]
        made.append(
            {
                "evaluations": step,
                "time": round(1 - step / steps, 6),
                "height": now.tolist(),
                "pieces": labels,
                "moved": (now != state).tolist(),
            }
        )
        state = now
    return made


def _coarser(name: str, height: int) -> str:
    return (
        name + ", \N{HORIZONTAL ELLIPSIS}"
        if height == 1
        else f"{name}, \N{HORIZONTAL ELLIPSIS} and {2 ** (4 * height)} more"
    )


def metrics(steps: int, height: int, seed: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    share = np.arange(1, height + 1) / sum(range(1, height + 1))
    for step in range(1, steps + 1):
        clean = 5.55 + 2.4 * math.exp(-step / (steps / 7)) + 1.2 * math.exp(-step / (steps / 60))
        noise = generator.normal(size=height) * 0.12
        levels: list[float | None] = [float(v) for v in clean * share + noise]
        bound: float | None = float(sum(v for v in levels if v is not None))
        if height > 3 and step % 5 == 0:
            levels[1], bound = None, None  # a small batch that missed a level
        lines.append(
            {
                "kind": "train",
                "step": step,
                "loss": clean * 0.8 + float(generator.normal()) * 0.1,
                "bound": bound,
                "levels": levels,
                "lr": 1e-3,
                "grad_norm": 0.7,
                "tokens": step * 4096,
                "seconds": step * 0.19,
                "tokens_per_second": 21_500 + float(generator.normal()) * 400,
                "memory": 812_000_000,
            }
        )
        if step % (steps // 8) == 0:
            lines.append(
                {
                    "kind": "valid",
                    "step": step,
                    "bound": clean + 0.06,
                    "error": 0.03,
                    "levels": [float(v) for v in (clean + 0.06) * share],
                    "tokens": 20_700,
                }
            )
    return lines


def write_fake_run(
    folder: Path,
    *,
    height: int = 2,
    steps: int = 600,
    seed: int = 1,
    pad: str = "count",
    bound: float = 5.6134,
    only: set[str] | None = None,
) -> Path:
    """Write the files of a run; `only` limits which."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": f"tdlm train demo --data data --tree tree.safetensors --out {folder.name}",
        "started": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789ab",
        "device": "a processor, 2 threads",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "tdlm": "0.1.0"},
        "data_fingerprint": "9f3c2a7e41d05b86",
        "tokenizer_hash": "a81d6cf2390e7b54",
        "tree_hash": "44d0c1b7e9a2f386",
        "parameters": {
            "blocks": 793_600,
            "embedding": 262_144,
            "head": 16_512,
            "conditioning": 49_408,
            "elsewhere": 328_064,
            "total": 1_121_664,
        },
    }
    config = {
        "name": folder.name,
        "method": {
            "kind": "tree",
            "process": {"kind": "cascade", "alpha": {"kind": "linear"}},
            "head": {"kind": "shared"},
            "clip": 2.0,
        },
        "data": {"length": 128, "layout": "document"},
        "backbone": {"blocks": 4, "width": 128, "heads": 4},
        "train": {"steps": steps, "batch": 32, "lr": 1e-3, "seed": seed},
    }
    pieces = tokens(PROSE)
    share = np.arange(1, height + 1) / sum(range(1, height + 1))
    nothing, gap = [False] * len(pieces), [not 30 <= place < 85 for place in range(len(pieces))]
    settings = {"steps": 64, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    files: dict[str, Any] = {
        "config.json": {"config": config, "provenance": origin},
        "eval.json": {
            "bound": bound,
            "error": 0.0112,
            "perplexity": math.exp(bound),
            "bits_per_byte": bound / 4.26 / math.log(2),
            "levels": (bound * share).tolist(),
            "level_errors": [0.008] * height,
            "tokens": 20_738,
            "bytes": 88_335,
            "documents": 3,
            "estimator": "count",
            "repeats": 8,
            "pad": pad,
            "step": steps,
            "provenance": {**origin, "command": f"tdlm eval {folder.name}", "seed": 5},
            "ngrams": {"unigram": 6.768, "bigram": 5.351, "trigram": 5.244},
        },
        "samples.json": {
            "groups": [
                {
                    "title": "From nothing",
                    "settings": settings,
                    "evaluations": 64,
                    "seconds": 1.87,
                    "samples": [
                        {"text": "".join(pieces[start:] + pieces[:start]), "tokens": list(range(len(pieces)))}
                        for start in range(0, 36, 6)
                    ],
                },
                {
                    "title": "Filling a gap",
                    "settings": settings,
                    "evaluations": 61,
                    "seconds": 1.7,
                    "samples": [
                        {
                            "text": PROSE,
                            "tokens": list(range(len(pieces))),
                            "spans": [[0, 150, "given"], [150, 350, "made"], [350, len(PROSE), "given"]],
                        }
                    ],
                },
            ]
        },
        "trace.json": {
            "traces": [
                {
                    "title": "From nothing to a text",
                    "kind": "sample",
                    "prompt": None,
                    "settings": settings,
                    "frames": frames(pieces, steps=64, height=height, given=nothing),
                },
                {
                    "title": "Filling a gap",
                    "kind": "infill",
                    "frames": frames(pieces, steps=48, height=height, given=gap, seed=1),
                },
            ]
        },
        "tree.svg": TREE,
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics(steps, height, seed)),
    }
    for name, content in files.items():
        if only is None or name in only:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    if only is None or "tree.safetensors" in only:
        from tdlm.tree.tree import Tree

        Tree.from_nested([list(range(first, first + 16)) for first in range(0, 256, 16)]).save(
            folder / "tree.safetensors"
        )
    return folder


def _tree() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="260" viewBox="0 0 800 260">',
        '<g id="edges" stroke="#889">'
    ]
    for place in range(16):
        x = 25 + 50 * place
        parts.append(f'<path d="M400 20 C400 90 {x} 70 {x} 140" fill="none"/>')
        parts += [f'<path d="M{x} 140 L{x - 18 + 12 * leaf} 220"/>' for leaf in range(4)]
    parts.append('</g><g fill="#2a4580"><circle cx="400" cy="20" r="7"/>')
    parts += [f'<circle cx="{25 + 50 * place}" cy="140" r="5" fill="#469fae"/>' for place in range(16)]
    parts.append('</g><text x="415" y="24" font-size="12">root</text></svg>')
    return "".join(parts)


TREE = _tree()

if __name__ == "__main__":
    print(write_fake_run(Path(sys.argv[1])))
