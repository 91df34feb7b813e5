"""The paper's ablations of the tree, of the weights and of what is predicted together, and what it never varies: the vectors.

Two kinds of trees stand side by side in `branching`: `hdlm`, the reference clustering, which asks for sizes but does not enforce
them, so that K=256 comes out three levels high and K=2 sixteen and more (the paper's heights), and `kmeans`, whose bounds hold
exactly. The height that came out is in the table. (At toy size the reference is asked for small K only: with so few tokens it
cannot split what it has put together, and says so.)
"""
from __future__ import annotations

from typing import Any, cast

from ..objectives.joint import JointMethod
from ..objectives.tree import TreeMethod
from .entry import Entry, Size, Study, vectors_name
from .levels import WEIGHTS, level_bounds, weight_curves
from .settings import ablation

BRANCHINGS: dict[Size, tuple[int, ...]] = {"toy": (2, 4, 17, 64), "budget": (2, 4, 64, 128, 256, 512, 1024),
                                           "full": (2, 4, 64, 128, 256, 512, 1024)}
RATIOS = ((0.9, 1.1), (0.8, 1.2), (0.7, 1.3), (0.6, 1.4), (0.5, 1.5))
"""Least and largest size of a child, in means. Symmetric about 1: the paper's trees of K=2 go from 16 to 21 levels."""


def _branching(size: Size) -> list[Entry]:
    return [ablation(size, f"{method}-{k}", TreeMethod(), {"branching": k, "method": method}, {"clustering": method, "K": k})
            for method in ("hdlm", "kmeans") for k in BRANCHINGS[size] if size != "toy" or method == "kmeans" or k <= 4]


def _size_ratio(size: Size) -> list[Entry]:
    return [ablation(size, f"ratio-{low:g}-{high:g}", TreeMethod(), {"branching": 2, "min_ratio": low, "max_ratio": high},
                     {"min ratio": low, "max ratio": high}) for low, high in RATIOS]


def _level_weights(size: Size) -> list[Entry]:
    return [ablation(size, kind if kind == "none" else f"{kind}-{gamma:g}",
                     TreeMethod(level_weights=cast(Any, kind), level_gamma=gamma), {"branching": 2},
                     {"weights": kind, "gamma": gamma}) for kind, gamma in WEIGHTS]


def _joint(size: Size) -> list[Entry]:
    pairs = ((2, 2), (2, 4), (2, 8), (4, 2)) if size == "toy" else ((2, 4), (2, 8), (2, 16), (4, 8))
    alone = [ablation(size, f"K{k}", TreeMethod(), {"branching": k}, {"K": k, "L": 1}) for k in (2, 4)]
    return alone + [ablation(size, f"K{k}-L{length}", JointMethod(neighbourhood=length), {"branching": k}, {"K": k, "L": length})
                    for k, length in pairs]


CORPUS: dict[str, dict[str, Any]] = {
    "corpus": {}, "corpus-next": {"window": 1}, "corpus-pooled": {"sides": "pooled"}, "corpus-euclidean": {"metric": "euclidean"},
    "corpus-wide": {"min_ratio": 0.5, "max_ratio": 2.0}, "corpus-spread": {"max_mass": 4.0},
    "corpus-exchange": {"method": "exchange"}, "corpus-hdlm": {"method": "hdlm"}, "random": {"method": "random"},
    "frequency": {"method": "frequency"}}
"""How the corpus can be asked who is whose sibling (docs/tree.md), and the two controls that do not ask it."""


def _tree_size(size: Size) -> dict[str, Any]:
    return {"branching": 4 if size == "toy" else 512}


def _trees(size: Size) -> list[Entry]:
    return [ablation(size, name, TreeMethod(), {**_tree_size(size), **options}, {})
            for name, options in CORPUS.items()]


def _other_vectors(size: Size, vectors: str) -> Entry:
    name = vectors_name(vectors)
    return ablation(size, name, TreeMethod(), {**_tree_size(size), "vectors": vectors}, {})


def _per_level(size: Size) -> list[Entry]:
    return [entry for entry in _branching(size) if entry.name.startswith("kmeans")]


BRANCHING = Study("branching", "How many children a node has: the reference clustering, and bounds that hold.", _branching,
                  level_bounds)
SIZE_RATIO = Study("size-ratio", "K=2 with children of more and less equal size: lower and higher trees.", _size_ratio)
LEVEL_WEIGHTS = Study("level-weights", "K=2: training weights that rise with the level.", _level_weights, level_bounds)
WEIGHT_SCHEDULES = Study("weight-schedules", "The curves of these weights. Nothing is trained.", lambda size: [], weight_curves)
JOINT = Study("joint", "Neighbourhoods of L positions predicted together, beside positions alone.", _joint)
TREES = Study("trees", "Which tokens are siblings: by chance, by frequency, by the corpus, by another model's vectors.", _trees,
              needs="other models' vectors only if you want them: --vectors FILE (or hf:OWNER/MODEL), as often as you like",
              with_vectors=_other_vectors)
LEVELS = Study("bounds-per-level", "Where in the tree the nats are paid: stacked and raw, for trees of different K.", _per_level,
               level_bounds, needs="finished runs if there are any (--finished RUN, as often as you like); else trains its own")
