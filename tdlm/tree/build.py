"""The recursion that makes a tree from token vectors (paper: Algorithm 2), level by level.

A node of at most K tokens splits into single tokens; a larger one into K clusters whose sizes obey exact bounds

    m = size / K,   lo = max(1, floor(min_ratio m)),   hi = max(ceil(m), floor(max_ratio m)),

capped at K^(levels left below the child) when a height is asked for. All nodes of a level are clustered together.
Tokens without a vector (an all-zero row: PAD, bytes the embedding lacks, tokens never seen) do not take part in the
clustering of a node; they are put last, in order of their ids, into the clusters nearest to the node's mean that have
room. The children of a node stand in order of their smallest token id (`order="id"`) or their total count, largest
first (`order="count"`).

Method `exchange` goes on from K-means: tokens move while neighbours' classes tell more (`exchange.py`). Where K classes are
few for that (K^2 < V), neighbours are seen through M classes found first, as many as K or V/16, at most 512; below the
root, through those or the root's.

`complete` is Algorithm 2's "forcing a complete tree": paths that end early are padded by repeating the token (free: one
child, no nats, no row of its own). With complete=False nothing may be padded: the tree is cut so that every path has
the full height of real choices, by also keeping 2^(levels left) tokens or more in every child; needs K >= 3.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import torch

from .. import rng
from ..errors import TreeError
from .cluster import Task, balanced_kmeans_many, check_rows, cluster_sums, inertia
from .embeddings import Vectors
from .exchange import exchange
from .mass import capped, spread
from .neighbours import Neighbours
from .reference import hdlm_kmeans
from .request import VECTORIAL, Method, check_request, lowest_height, needed
from .tree import Tree, split_bounds


@dataclass
class _Node:
    tokens: np.ndarray  # sorted ids
    children: list["_Node"] = field(default_factory=list)


@dataclass(frozen=True)
class _Plan:
    """What was asked for, and the vectors; `height` is None when the tree may be as high as it comes out."""

    size: int
    branching: int
    min_ratio: float
    max_ratio: float
    height: int | None
    max_depth: int
    complete: bool
    seed: int
    method: Method
    order: str
    iterations: int
    device: str
    rows: np.ndarray | None
    known: np.ndarray
    counts: np.ndarray | None
    cosine: bool
    near: Neighbours | None
    rounds: int
    max_mass: float | None
    say: Callable[[str], None] | None

    def is_last(self, size: int, depth: int) -> bool:
        """Whether a node of this many tokens at this depth splits into single tokens."""
        if not self.complete and self.height is not None and self.height - depth > 1:
            return False
        return size <= self.branching

    def bounds(self, size: int, depth: int) -> tuple[int, int, int]:
        """(number of children, lo, hi) for a node that is split into clusters."""
        if self.height is None:
            return (self.branching, *split_bounds(size, self.branching, self.min_ratio, self.max_ratio))
        left = self.height - depth - 1  # levels below the children
        least = 1 if self.complete else 2**left
        k = self.branching if self.complete else min(self.branching, size // least)
        lo, hi = split_bounds(size, max(k, 1), self.min_ratio, self.max_ratio, self.branching**left)
        return k, max(lo, least), hi


def build_tree(vectors: np.ndarray | Vectors | None, *, branching: int, size: int | None = None, min_ratio: float = 0.8,
               max_ratio: float = 1.2, height: int | None = None, max_depth: int = 32, complete: bool = True,
               seed: int = 0, method: Method = "kmeans", counts: np.ndarray | None = None, order: str = "id",
               tokenizer_hash: str = "", iterations: int = 20, device: str = "cpu", near: Neighbours | None = None,
               rounds: int = 12, max_mass: float | None = None, say: Callable[[str], None] | None = None,
               progress: Callable[[int, int, int], None] | None = None) -> Tree:
    """A tree over the tokens 0..V-1; `device` is where distances and prices are computed.

    `vectors` has a row a token (all zero: no vector); rows missing at the end up to `size` count as zero (PAD). The
    controls `random` and `frequency` (which needs `counts`) look at no vector. `exchange` needs `near` too, and makes at most
    `rounds` rounds. With `max_mass` no child of a node that is clustered holds more than so many times its share of the text
    (`mass.py`; needs `counts`). `progress(depth, done, total)` is called in tokens.
    """
    source = dict(vectors.source) if isinstance(vectors, Vectors) else {}
    rows = vectors.rows if isinstance(vectors, Vectors) else vectors
    rows, known, size = _prepare_rows(rows, size, method)
    if counts is not None and len(counts) != size:
        raise TreeError(f"counts are for {len(counts)} tokens, the tree has {size}; take both from the same data")
    if method == "frequency" and counts is None:
        raise TreeError("a frequency tree needs token counts: give --data DIR, whose train split is counted")
    if method == "exchange" and near is None:
        raise TreeError("exchange looks at the neighbours of tokens in text: give --data DIR")
    if near is not None and near.size != size:
        raise TreeError(f"neighbours are counted for {near.size} tokens, the tree has {size}; take both from the same data")
    check_request(size, branching=branching, min_ratio=min_ratio, max_ratio=max_ratio, height=height, max_depth=max_depth,
                  complete=complete, method=method, max_mass=max_mass, counted=counts is not None)
    if order not in ("id", "count"):
        raise TreeError(f"unknown order of children {order!r}; choose id or count")
    if not complete and height is None:
        height = lowest_height(size, branching)
    plan = _Plan(size, branching, min_ratio, max_ratio, height, max_depth, complete, seed, method, order, iterations,
                 device, rows, known, counts, bool(source.get("metric") == "cosine"), near, rounds, max_mass, say)
    root, levels = _grow(plan, progress)
    tree = Tree.from_nested(_nested(root, plan), size=size, branching=branching, tokenizer_hash=tokenizer_hash,
                            meta=_meta(plan, source, levels))
    if height is not None and tree.height != height:
        raise TreeError(f"the tree came out {tree.height} levels high, {height} were asked for: K={branching} needs no "
                        f"more; ask for --height {tree.height}, or a smaller K ({needed(size, height)} or a little more)")
    return tree.check()


def _prepare_rows(rows: np.ndarray | None, size: int | None, method: str) -> tuple[np.ndarray | None, np.ndarray, int]:
    if rows is None:
        if size is None:
            raise TreeError("without vectors the number of tokens must be given")
        if method in VECTORIAL:
            raise TreeError(f"method {method} clusters token vectors, none were given; choose an embedding")
        return None, np.zeros(size, dtype=bool), size
    rows = check_rows(rows)
    size = len(rows) if size is None else size
    if len(rows) > size:
        raise TreeError(f"{len(rows)} token vectors for {size} tokens; the embedding belongs to another vocabulary")
    rows = np.concatenate([rows, np.zeros((size - len(rows), rows.shape[1]), dtype=np.float32)])
    known = (rows != 0).any(axis=1)
    if method in VECTORIAL and not known.any():
        raise TreeError("every token vector is zero, there is nothing to cluster; choose another embedding or --method random")
    return rows, known, size


def _grow(plan: _Plan, progress: Callable[[int, int, int], None] | None) -> tuple[_Node, list[dict[str, Any]]]:
    root = _Node(np.arange(plan.size))
    levels: list[dict[str, Any]] = []
    context = _contexts(plan) if plan.method == "exchange" else None
    current, depth = [root], 0
    while current:
        splitting = [node for node in current if not plan.is_last(len(node.tokens), depth)]
        for node in current:
            if plan.is_last(len(node.tokens), depth):
                node.children = [_Node(node.tokens[i : i + 1]) for i in range(len(node.tokens))]
        if splitting:
            _check_depth(plan, splitting, depth)
            total, done = sum(len(node.tokens) for node in splitting), [0]

            def report(tokens: int, depth: int = depth, total: int = total, done: list[int] = done) -> None:
                done[0] += tokens
                if progress is not None:
                    progress(depth, done[0], total)

            levels.append({"depth": depth, **_split_level(plan, splitting, depth, report, context)})
            if depth == 0 and context is None:
                context = _classes_of(root.children, plan.size)
        current = [child for node in current for child in node.children if len(child.tokens) > 1]
        depth += 1
    return root, levels


def _check_depth(plan: _Plan, splitting: list[_Node], depth: int) -> None:
    """A node that must be split into clusters needs two more levels."""
    if depth + 2 > plan.max_depth:
        largest = max(len(node.tokens) for node in splitting)
        way = ("a smaller --branching, or --method kmeans (the reference routine does not enforce its sizes)"
               if plan.method == "hdlm" else f"K >= {needed(plan.size, plan.max_depth)} with --height {plan.max_depth}")
        raise TreeError(f"a node of {largest} tokens stands at depth {depth} and K={plan.branching}, but --max-depth is "
                        f"{plan.max_depth}; raise it, or use {way}")


def _split_level(plan: _Plan, nodes: list[_Node], depth: int, report: Callable[[int], None],
                 context: np.ndarray | None) -> dict[str, Any]:
    bounds = [plan.bounds(len(node.tokens), depth) for node in nodes]
    for node, (k, lo, hi) in zip(nodes, bounds):
        size = len(node.tokens)
        if plan.method != "hdlm" and not lo * k <= size <= hi * k:
            raise TreeError(f"a node of {size} tokens at depth {depth} cannot be split into {k} children of {lo} to {hi} "
                            f"tokens; use K >= {needed(plan.size, plan.height or depth + 2)}, wider ratios, or no --height")
    more: dict[str, Any] = {}
    if plan.method in ("kmeans", "exchange"):
        labels = _kmeans_labels(plan, nodes, bounds, depth, report)
        if plan.max_mass is not None:
            assert plan.rows is not None and plan.counts is not None
            labels = [spread(plan.rows[node.tokens], label, plan.counts[node.tokens], k, plan.max_mass)
                      for node, label, (k, _, _) in zip(nodes, labels, bounds)]
        if plan.method == "exchange":
            more = {"information": _exchanged(plan, nodes, bounds, labels, context)}
    elif plan.method == "hdlm":
        labels = [_hdlm_labels(plan, node, number, depth) for number, node in enumerate(nodes)]
    else:
        labels = [_even_labels(plan, node, k, depth) for node, (k, _, _) in zip(nodes, bounds)]
    outside, total, smallest, largest = 0, 0.0, plan.size, 0
    for node, label, (k, lo, hi) in zip(nodes, labels, bounds):
        sizes = np.bincount(label, minlength=k)
        outside += int(((sizes < lo) | (sizes > hi)).sum())
        smallest, largest = min(smallest, int(sizes.min())), max(largest, int(sizes.max()))
        seen = plan.known[node.tokens]
        if plan.rows is not None and seen.any():
            total += inertia(plan.rows, label[seen], k, node.tokens[seen])
        order = np.argsort(label, kind="stable")
        parts = np.split(node.tokens[order], np.cumsum(sizes)[:-1])
        node.children = [_Node(part) for part in parts if len(part)]
    assert plan.method == "hdlm" or outside == 0, "bounds are exact"
    return {"nodes": len(nodes), "lo": min(b[1] for b in bounds), "hi": max(b[2] for b in bounds), "min": smallest,
            "max": largest, "outside": outside, "inertia": float(f"{total:.6g}"), **more}


def _kmeans_labels(plan: _Plan, nodes: list[_Node], bounds: list[tuple[int, int, int]], depth: int,
                   report: Callable[[int], None]) -> list[np.ndarray]:
    """Clusters of the tokens that have vectors, all nodes together; then the others are placed."""
    assert plan.rows is not None
    tasks, where = [], []
    labels = [np.zeros(len(node.tokens), dtype=np.int64) for node in nodes]
    for number, (node, (k, lo, hi)) in enumerate(zip(nodes, bounds)):
        seen = node.tokens[plan.known[node.tokens]]
        if len(seen) <= k:
            labels[number][plan.known[node.tokens]] = np.arange(len(seen))
            continue
        if lo * k > len(seen):  # the others must fill up every cluster, so these are spread evenly
            lo, hi = len(seen) // k, -(-len(seen) // k)
        tasks.append(Task(seen, k, lo, hi))
        where.append(number)
    found = balanced_kmeans_many(plan.rows, tasks, seed=rng.key("tree", plan.seed, depth), iterations=plan.iterations,
                                 device=plan.device, progress=report)
    for number, label in zip(where, found):
        labels[number][plan.known[nodes[number].tokens]] = label
    for node, label, (k, lo, hi) in zip(nodes, labels, bounds):
        if not plan.known[node.tokens].all():
            _place(plan.rows[node.tokens], plan.known[node.tokens], label, k, lo, hi)
    return labels


def _exchanged(plan: _Plan, nodes: list[_Node], bounds: list[tuple[int, int, int]], labels: list[np.ndarray],
               context: np.ndarray | None) -> list[float]:
    """Better labels, in place; the mean of what nodes tell about neighbours, before and after."""
    assert plan.near is not None
    values = []
    for node, label, (k, lo, hi) in zip(nodes, labels, bounds):
        whole = np.full(plan.size, -1, dtype=np.int64)
        whole[node.tokens] = label
        weight, most = None, np.inf
        if plan.max_mass is not None:
            assert plan.counts is not None
            weight, most = capped(plan.counts * (whole >= 0), k, plan.max_mass)
        found, value = exchange(plan.near, whole, k, lo, hi, context=context, weight=weight, most=most, rounds=plan.rounds,
                                device=plan.device, say=plan.say if len(nodes) == 1 else None)
        label[:] = found[node.tokens]
        values.append((value[0], value[-1]))
    return [float(f"{mean:.6g}") for mean in np.mean(values, axis=0)]


def _contexts(plan: _Plan) -> np.ndarray | None:
    """Classes (V,) that neighbours are seen through, when the root's own are too few; None when they will do."""
    if plan.branching**2 >= plan.size:
        return None
    root, k = _Node(np.arange(plan.size)), min(max(plan.branching, plan.size // 16), 512)
    bounds = [(k, *split_bounds(plan.size, k, plan.min_ratio, plan.max_ratio))]
    labels = _kmeans_labels(plan, [root], bounds, -1, lambda tokens: None)
    _exchanged(plan, [root], bounds, labels, None)
    return labels[0]


def _classes_of(nodes: list[_Node], size: int) -> np.ndarray:
    label = np.zeros(size, dtype=np.int64)
    for number, node in enumerate(nodes):
        label[node.tokens] = number
    return label


def _place(rows: np.ndarray, known: np.ndarray, label: np.ndarray, k: int, lo: int, hi: int) -> None:
    """Tokens without a vector, in place: first what clusters lack, then the nearest with room, nearest to the mean first."""
    size = np.bincount(label[known], minlength=k)
    total = cluster_sums(rows, np.flatnonzero(known), label[known], k)
    centres = total / np.maximum(size, 1)[:, None]
    mean = rows[known].mean(0) if known.any() else np.zeros(rows.shape[1])
    near = np.argsort(np.where(size > 0, ((centres - mean) ** 2).sum(1), np.inf), kind="stable")
    lack = np.maximum(lo - size, 0)[near]
    room = (hi - np.maximum(size, lo))[near]
    order = np.r_[np.repeat(near, lack), np.repeat(near, np.maximum(room, 0))]
    label[~known] = order[: int((~known).sum())]


def _even_labels(plan: _Plan, node: _Node, k: int, depth: int) -> np.ndarray:
    """Controls: the node's tokens shuffled, or in order of falling count, cut into k parts as equal as can be."""
    n = len(node.tokens)
    if plan.method == "random":
        order = rng.shuffle(n, "random tree", plan.seed, depth, int(node.tokens[0])).numpy()
    else:
        assert plan.counts is not None
        order = np.argsort(-plan.counts[node.tokens], kind="stable")
    label = np.empty(n, dtype=np.int64)
    label[order] = np.arange(n) * k // n
    return label


def _hdlm_labels(plan: _Plan, node: _Node, number: int, depth: int) -> np.ndarray:
    assert plan.rows is not None
    seed = rng.key("hdlm", plan.seed, depth, number) & 0x7FFFFFFF
    label = hdlm_kmeans(plan.rows[node.tokens], plan.branching, min_ratio=plan.min_ratio, max_ratio=plan.max_ratio,
                        seed=seed, cosine=plan.cosine)
    if len(np.unique(label)) == 1:  # one cluster took everything: a cut in order of ids, or the recursion never ends
        label = np.arange(len(label)) * plan.branching // len(label)
    return label


def _nested(root: _Node, plan: _Plan) -> list[Any]:
    """Nested lists with the children in their final order; a child of one token is the token."""

    counts = plan.counts if plan.order == "count" else None

    def rank(node: _Node) -> tuple[float, int]:
        first = int(node.tokens.min())
        return (0.0 if counts is None else -float(counts[node.tokens].sum()), first)

    def walk(node: _Node) -> Any:
        if len(node.tokens) == 1:
            return int(node.tokens[0])
        return [walk(child) for child in sorted(node.children, key=rank)]

    return walk(root)


def _meta(plan: _Plan, source: dict[str, Any], levels: list[dict[str, Any]]) -> dict[str, Any]:
    """How the tree was made. No times, paths or host names: the same request gives the same bytes."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    try:
        versions["tdlm"] = metadata.version("tdlm")
    except metadata.PackageNotFoundError:
        versions["tdlm"] = "source"
    mass = {} if plan.max_mass is None else {"max_mass": plan.max_mass}
    place = torch.device(plan.device).type
    return {"method": plan.method, "vectors": source, "seed": plan.seed, "order": plan.order, "complete": plan.complete,
            "iterations": plan.iterations, "max_depth": plan.max_depth, "without_vector": int((~plan.known).sum()),
            "bounds": {"exact": plan.method != "hdlm" and plan.complete, "min_ratio": plan.min_ratio,
                       "max_ratio": plan.max_ratio, "height": plan.height, **mass},
            **({"exchange": {"window": plan.near.window, "rounds": plan.rounds}} if plan.near is not None else {}),
            **({} if place == "cpu" else {"device": place}), "levels": levels, "versions": versions}
