"""Masked diffusion (MDLM): the tree method on the star tree, whose only level lies between a token and MASK.

A position is MASK with probability t and predicts its token with weight -alpha' / (1 - alpha) = 1 / t, so everything is
the tree's own code: the bound, the exact `count` estimator (for a network that is not told the time), the sampler whose
step from t to s < t reveals a position with probability (t - s) / t, and its free steps in which nothing moves.

Two variants were published; for training they differ in where 1 / t stops growing and in what the network is told:

    mdlm    t is drawn from [1e-3, 1]; the network is not told the time    (backbone.conditioning=none; average of weights)
    gidd    t is drawn from [1e-4, 1]; the network is told t               (backbone.conditioning=time)

Here t is drawn from all of (0, 1), evenly spaced over the global batch, and the *train* weight is min(1/t, 1/floor); the
bound keeps 1 / t. (`clip` bounds the train weight further; with 1 it is the same at all times.) Optimiser, average of weights and
conditioning are the recipe's.

Not reproduced: loops that begin at the second time of their grid, float32 draws that truncate rare tokens, MASK sharing
PAD's id, and padding columns of the output matrix that take probability.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, TreeError
from ..model.head import Shared
from ..process import Cascade
from ..registry import register
from ..tree.tree import Tree
from .tree import TreeMethod, TreeObjective

FLOOR = {"mdlm": 1e-3, "gidd": 1e-4}


@register("mdlm")
@dataclass(frozen=True)
class MdlmMethod:
    head: Any = field(default_factory=Shared)
    pad: Literal["count", "given-length"] = "count"
    variant: Literal["mdlm", "gidd"] = "mdlm"
    clip: float | None = None
    """The largest train weight; none: as published, where t stops."""
    role = "method"
    flat = True
    causal = False

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"method.clip must be positive or none, got {self.clip}")

    def objective(self, tree: Tree, pad_id: int | None) -> TreeObjective:
        if tree.height != 1:
            raise TreeError(f"mdlm works on the star tree, got a tree of height {tree.height}; use Tree.star(tokens)")
        return TreeObjective(TreeMethod(Cascade(), self.head, self.pad, clip=self.clip or 1 / FLOOR[self.variant]), tree, pad_id)
