"""Parts from outside the package, in one file: a head and a process, used by name.

    tdlm train tiny --plugin plugin_parts --set method.head=parent-bias --set method.process=top-heavy \\
        --data DIR --tree FILE --out RUN          (from this folder)

A part is a frozen dataclass with a `role`, registered under a name. A head builds a module that answers `nll` and
`log_probs`; a process answers what `tdlm.process.Process` lists - here by refining the cascade.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tdlm.model.head import SharedHead
from tdlm.process import Cascade
from tdlm.registry import register
from tdlm.tree import Tree


class ParentBiasHead(SharedHead):
    """The paper's shared matrix, and a bias of its own for every slot of every inner node."""

    def __init__(self, tree: Tree, width: int):
        super().__init__(tree, width)
        self.own = nn.Embedding(tree.nodes - tree.size, tree.branching)
        nn.init.zeros_(self.own.weight)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return super().logits(hidden, parent) + self.own((parent - self.tokens).clamp(min=0))


@register("parent-bias")
@dataclass(frozen=True)
class ParentBias:
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> ParentBiasHead:
        head = ParentBiasHead(tree, embedding.embedding_dim)
        if mass is not None:  # start at the unigram model of the training tokens
            table = tree.children.clamp(min=0)
            share = mass[table] / mass[tree.size:, None]
            head.own.weight.data.copy_(torch.log(share.clamp(min=1e-12)).masked_fill(tree.children < 0, 0.0))
        return head


@register("top-heavy")
@dataclass(frozen=True)
class TopHeavy(Cascade):
    """A cascade whose levels take longer the closer they are to the root: level l gets a share proportional to l + 1."""

    def edges(self, height: int) -> list[float]:
        total = height * (height + 1) / 2
        return [level * (level + 1) / 2 / total for level in range(height)] + [1.0]
