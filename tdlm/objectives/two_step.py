"""Masked diffusion whose softmax goes down a tree: class, then token, both from one hidden state.

The process is MDLM's: a position is its token or MASK, and nothing in between is ever seen (`mdlm.py`). Only -log p(x | h) is
a sum over the levels of a tree (`model/path.py`). So this is what a tree gives as a *factored softmax* alone; what the tree
method has beyond it is a process that shows the class before the token. Bound, estimators, PAD and samplers are the star
tree's; a sampler draws from the product of the steps, which is drawing the class first and the token below it.

On the star tree it is MDLM with the tied head, but for a row for MASK that nothing reads.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import ConfigError
from ..model.path import Path
from ..process import Cascade
from ..registry import register
from ..tree.tree import Tree
from .mdlm import FLOOR
from .tree import TreeMethod, TreeObjective


@register("two-step")
@dataclass(frozen=True)
class TwoStepMethod:
    head: Any = field(default_factory=Path)
    pad: Literal["count", "given-length"] = "count"
    clip: float | None = None
    """The largest train weight; none: MDLM's, where its t stops."""
    role = "method"
    flat = False
    causal = False

    def __post_init__(self) -> None:
        if not isinstance(self.head, Path):
            raise ConfigError(f"two-step asks for the whole path at once: method.head=path, got {self.head.kind}; heads that ask "
                              "for one step belong to method tree")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"method.clip must be positive or none, got {self.clip}")

    def objective(self, tree: Tree, pad_id: int | None) -> TreeObjective:
        with torch.device("cpu"):  # also where the network is only counted
            star = Tree.star(tree.size, tree.tokenizer_hash)
        star = star.to(tree.ancestor.device)
        return TreeObjective(TreeMethod(Cascade(), self.head, self.pad, clip=self.clip or 1 / FLOOR["mdlm"]), star, pad_id)
