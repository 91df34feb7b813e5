"""Look at a tree: sizes, how the slots are used, what each level costs a predictor that sees no context.

    uniform      sum over levels of E log(children): what a predictor costs that spreads its chances evenly
    unigram      H(level l) = sum over nodes u at height l+1 of p(u) H(child | u): what a context-free model pays at
                 level l; the levels add up to the entropy of the unigram distribution

All in nats a token; expectations under the corpus counts where there are some, else over the vocabulary.
"""
from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import TreeError
from .tree import Tree


class Decoder(Protocol):
    """What a tokenizer must offer for its tokens to be shown."""

    def piece(self, number: int) -> str: ...


def describe(tree: Tree, counts: np.ndarray | None = None, tokenizer: Decoder | None = None, examples: int = 6) -> dict[str, Any]:
    """Plain JSON data about a tree; levels from the root down to the leaves."""
    if counts is not None and len(counts) != tree.size:
        raise TreeError(f"counts are for {len(counts)} tokens, the tree has {tree.size}; take both from the same data")
    weight = torch.ones(tree.size, dtype=torch.float64) if counts is None else torch.as_tensor(np.asarray(counts)).double()
    if float(weight.sum()) <= 0:
        weight = torch.ones(tree.size, dtype=torch.float64)
    share = tree.mass(weight / weight.sum())
    leaves = tree.leaf_counts()
    levels = [_level(tree, h, share, leaves) for h in range(tree.height, 0, -1)]
    active = (tree.num_children[tree.ancestor[1:]] > 1).sum(0).double()
    probability = weight / weight.sum()
    unigram = float(-(probability * probability.clamp(min=1e-300).log()).sum())
    return {
        "tokens": tree.size, "branching": tree.branching, "height": tree.height, "nodes": tree.nodes,
        "internal": tree.nodes - tree.size, "weighted_by": "vocabulary" if counts is None else "counts",
        "uniform": sum(level["uniform"] for level in levels), "unigram": unigram,
        "padded_tokens": int((active < tree.height).sum()),
        "active_levels": {"min": int(active.min()), "mean": float(active.mean()), "max": int(active.max()),
                          "expected": float((active * probability).sum())},
        "levels": levels, "examples": _examples(tree, weight, share, leaves, tokenizer, examples), "meta": tree.meta,
    }


def _level(tree: Tree, h: int, share: torch.Tensor, leaves: torch.Tensor) -> dict[str, Any]:
    """The nodes at height h and the step down from them (level h - 1)."""
    here = torch.unique(tree.ancestor[h])
    nodes = here[here >= tree.size]
    rows = tree.children[nodes - tree.size]
    real = rows >= 0
    below = torch.where(real, share[rows.clamp(min=0)], 0.0)
    sizes, number = leaves[nodes], real.sum(1)
    kids = leaves[rows[real]]
    p = share[nodes]
    chance = below / p.clamp(min=1e-300)[:, None]
    entropy = -torch.where(chance > 0, chance * chance.clamp(min=1e-300).log(), 0.0).sum(1)
    return {
        "height": h, "nodes": len(nodes), "padded_paths": int((tree.ancestor[h] < tree.size).sum()),
        "children": _spread(number), "tokens": _spread(sizes), "child_tokens": _spread(kids),
        "utilisation": float(number.double().mean() / tree.branching), "reached": float(p.sum()),
        "uniform": float((p * number.double().log()).sum()), "unigram": float((p * entropy).sum()),
    }


def _spread(values: torch.Tensor) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.double().mean()), "max": int(values.max())}


def _examples(tree: Tree, weight: torch.Tensor, share: torch.Tensor, leaves: torch.Tensor, tokenizer: Decoder | None,
              examples: int) -> list[dict[str, Any]]:
    """Clusters of a readable size, spread over the range of how often they occur, with their most frequent tokens."""
    if examples <= 0:
        return []
    below = {h: torch.unique(tree.ancestor[h]) for h in range(1, tree.height)}
    height = min(below, key=lambda h: abs(math.log(tree.size / max(1, len(below[h])) / 30.0)), default=tree.height)
    nodes = below.get(height, torch.tensor([tree.root]))
    nodes = nodes[nodes >= tree.size]
    if not len(nodes):
        return []
    nodes = nodes[share[nodes].argsort(descending=True, stable=True)]
    picked = nodes[torch.linspace(0, len(nodes) - 1, min(examples, len(nodes))).long()].tolist()
    return [{"node": node, "tokens": int(leaves[node]), "share": float(share[node]),
             "most_frequent": [show(token, tokenizer) for token in top_tokens(tree, node, height, weight, 12)]}
            for node in picked]


def top_tokens(tree: Tree, node: int, height: int, weight: torch.Tensor, count: int) -> list[int]:
    """The heaviest tokens below a node at `height`, ties by id."""
    tokens = (tree.ancestor[height] == node).nonzero()[:, 0]
    return tokens[weight[tokens].argsort(descending=True, stable=True)[:count]].tolist()


def show(token: int, tokenizer: Decoder | None) -> str:
    """A token as visible text: spaces and control characters stand out."""
    if tokenizer is None:
        return str(token)
    text = tokenizer.piece(token)
    if not text:
        return f"<{token}>"
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "\ufffd": "�"}
    return "".join(signs.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def render(description: dict[str, Any]) -> Any:
    """A rich renderable of what `describe` found."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    d = description
    bounds = d["meta"].get("bounds") or {}
    made = ", ".join(str(part) for part in (d["meta"].get("method", "by hand"), (d["meta"].get("vectors") or {}).get("kind"))
                     if part)
    sizes = f", sizes {bounds['min_ratio']:g} to {bounds['max_ratio']:g} of the mean" if bounds else ""
    lines = [f"{d['tokens']:,} tokens, K={d['branching']}, height {d['height']}, {d['internal']:,} inner nodes ({made}{sizes})",
             f"uniform over children {d['uniform']:.3f} nats a token; unigram {d['unigram']:.3f} (by {d['weighted_by']})",
             f"real choices on a path: {d['active_levels']['min']} to {d['active_levels']['max']}, "
             f"{d['active_levels']['expected']:.2f} expected; {d['padded_tokens']:,} tokens have a padded path"]
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("height", no_wrap=True)
    for name in ("nodes", "children", "mean", "tokens\na child", "mean", "slots\nused", "reached", "uniform", "unigram"):
        table.add_column(name, justify="right", overflow="fold")  # a narrow terminal cuts no digit off
    for level in d["levels"]:
        table.add_row(f"{level['height']} → {level['height'] - 1}", f"{level['nodes']:,}", *_range(level["children"]),
                      *_range(level["child_tokens"]), f"{level['utilisation']:.1%}", f"{level['reached']:.1%}",
                      f"{level['uniform']:.3f}", f"{level['unigram']:.3f}")
    clusters = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cluster", "tokens", "share", "most frequent"):
        clusters.add_column(name, justify="left" if name == "most frequent" else "right", no_wrap=name != "most frequent")
    for example in d["examples"]:
        clusters.add_row(str(example["node"]), str(example["tokens"]), f"{example['share']:.2%}",
                         Text("  ".join(example["most_frequent"]), overflow="ellipsis", no_wrap=True))
    return Group(*lines, "", table, *(["", clusters] if d["examples"] else []))


def _range(spread: dict[str, float]) -> tuple[str, str]:
    """Least and most, and the mean where they differ."""
    least, most, mean = (spread[name] for name in ("min", "max", "mean"))
    return (f"{least:,}", "") if least == most else (f"{least:,}–{most:,}", f"{mean:,.1f}" if mean < 100 else f"{mean:,.0f}")
