"""The clustering routine of the hierarchical baseline, for ablations (`--method hdlm`): sizes are asked for, not enforced.

Written from the description of that routine, with its habits kept, because they shape the trees the paper used:
bounds are truncated (a small node may have a least size of 0); the pass that empties clusters that are too big does not
look at room where it sends points; the pass that fills clusters that are too small does not look at what it leaves
behind; sizes are measured once a pass; an empty cluster's centre becomes zero and is not seeded again. What comes out
is the assignment after size control of the last iteration.
"""
from __future__ import annotations

import numpy as np


def hdlm_kmeans(vectors: np.ndarray, k: int, *, min_ratio: float, max_ratio: float, seed: int, cosine: bool = False,
                iterations: int = 100, tolerance: float = 1e-4) -> np.ndarray:
    """(n, d) -> (n,) labels in 0..k-1; some clusters may be empty or out of bounds."""
    x = np.asarray(vectors, dtype=np.float32)
    if cosine:
        x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    least, most = int(len(x) / k * min_ratio), int(len(x) / k * max_ratio)
    centres = _plus_plus(x, k, np.random.default_rng(seed), cosine)
    label = np.zeros(len(x), dtype=np.int64)
    for _ in range(iterations):
        near = _nearness(x, centres, cosine)
        label = near.argmax(1)
        _shed(near, label, most)
        _fill(near, label, least)
        new = np.zeros_like(centres)
        np.add.at(new, label, x)
        new /= np.maximum(np.bincount(label, minlength=k), 1)[:, None]
        if cosine:
            new /= np.maximum(np.linalg.norm(new, axis=1, keepdims=True), 1e-12)
        moved = 1 - float((new * centres).sum(1).mean()) if cosine else float(np.linalg.norm(new - centres))
        centres = new
        if moved < tolerance:
            break
    return label


def _nearness(x: np.ndarray, centres: np.ndarray, cosine: bool) -> np.ndarray:
    """(n, k) the larger the nearer: cosine similarity, or minus the squared distance less |x|^2."""
    product = x @ centres.T
    return product if cosine else 2 * product - (centres * centres).sum(1)


def _plus_plus(x: np.ndarray, k: int, random: np.random.Generator, cosine: bool) -> np.ndarray:
    """Spread-out first centres: each drawn with chances that grow with the distance from those already there."""
    chosen = [int(random.integers(len(x)))]
    squares = (x * x).sum(1)
    chance = np.full(len(x), np.inf, dtype=np.float64)
    for _ in range(1, k):
        centre = x[chosen[-1]]
        product = x @ centre
        far = (1 - product) ** 2 if cosine else np.maximum(squares - 2 * product + squares[chosen[-1]], 0)
        chance = np.minimum(chance, far)
        total = chance.sum()
        # equal rows leave nothing to draw from (0/0 in the original): any row will do
        chosen.append(int(random.choice(len(x), p=chance / total)) if total > 0 else int(random.integers(len(x))))
    return x[chosen].copy()


def _shed(near: np.ndarray, label: np.ndarray, most: int) -> None:
    size = np.bincount(label, minlength=near.shape[1])
    if near.shape[1] < 2:
        return
    for cluster in np.flatnonzero(size > most):
        members = np.flatnonzero(label == cluster)
        elsewhere = near[members].copy()
        elsewhere[:, cluster] = -np.inf
        other = elsewhere.argmax(1)
        loss = near[members, cluster] - elsewhere[np.arange(len(members)), other]
        leave = np.argsort(loss, kind="stable")[: size[cluster] - most]
        label[members[leave]] = other[leave]


def _fill(near: np.ndarray, label: np.ndarray, least: int) -> None:
    size = np.bincount(label, minlength=near.shape[1])
    for cluster in np.flatnonzero(size < least):
        outside = np.flatnonzero(label != cluster)
        pull = np.argsort(-near[outside, cluster], kind="stable")[: least - size[cluster]]
        label[outside[pull]] = cluster
