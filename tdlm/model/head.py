"""Heads: from a hidden state at an active position to a distribution over the children of its node.

Every head answers `nll(hidden, parent, slot)` and `log_probs(hidden, parent)`. Only active positions are passed in
(gather first, then the matrix product): a leaf has no children, its logits would all be -inf and its gradients NaN.
Children fill slots 0..n-1, so the mask is `arange(K) < num_children[parent]`; nothing is ever V wide.

  shared   one d x K matrix and bias for all levels and parents (the paper)
  level    one such matrix per level
  tied     child k of u is scored by the input-embedding row of that child: h . E[child] + b[child]; no output matrix,
           and with the biases at the log unigram masses an untrained model already is the unigram model
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..registry import register
from ..tree.tree import Tree
from .transformer import zeroed


@runtime_checkable
class Head(Protocol):
    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """-log p(slot | hidden, parent), float32."""
        ...

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M K"]:
        """log p over all slots, -inf where the parent has no child."""
        ...


class _Head(nn.Module):
    """What the heads share: the tree's tables as buffers (not saved: the tree has its own file) and the masked softmax."""

    num_children: Tensor

    def __init__(self, tree: Tree):
        super().__init__()
        self.tokens, self.branching = tree.size, tree.branching
        self.register_buffer("num_children", tree.num_children.clone(), persistent=False)

    def masked(self, logits: Tensor, parent: Tensor) -> Tensor:
        slots = torch.arange(self.branching, device=parent.device)
        return logits.float().masked_fill(slots >= self.num_children[parent][:, None], -torch.inf)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must say how hidden states become logits")

    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        return F.cross_entropy(self.masked(self.logits(hidden, parent), parent), slot, reduction="none")

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M K"]:
        return self.masked(self.logits(hidden, parent), parent).log_softmax(-1)


class SharedHead(_Head):
    def __init__(self, tree: Tree, width: int):
        super().__init__(tree)
        self.output = zeroed(nn.Linear(width, tree.branching))

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return self.output(hidden)


class LevelHead(_Head):
    """Positions are sorted by level and each level takes its own matrix."""

    level: Tensor

    def __init__(self, tree: Tree, width: int):
        super().__init__(tree)
        self.outputs = nn.ModuleList(zeroed(nn.Linear(width, tree.branching)) for _ in range(tree.height))
        self.register_buffer("level", (tree.node_height() - 1).clamp(min=0), persistent=False)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        level = self.level[parent]
        order = torch.argsort(level, stable=True)
        counts = torch.bincount(level, minlength=len(self.outputs)).tolist()
        parts = [output(part) for output, part in zip(self.outputs, hidden[order].split(counts))]
        return torch.cat(parts)[torch.argsort(order)]


class TiedHead(_Head):
    """Positions are sorted by parent; each group meets the rows of its own children only."""

    child_table: Tensor

    def __init__(self, tree: Tree, embedding: nn.Embedding, bias: bool = True):
        super().__init__(tree)
        self._embedding = (embedding,)  # in a tuple: the backbone owns the parameter, saving it twice would be wrong
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings)) if bias else None
        self.register_buffer("child_table", tree.children.clone(), persistent=False)

    def start_at(self, mass: Float[Tensor, "N"]) -> None:
        """Biases at the log unigram mass of each node (counts are smoothed, so an unseen token keeps a finite one)."""
        if self.bias is not None:
            with torch.no_grad():
                self.bias[: len(mass)] = torch.log(mass / mass.max()).to(self.bias)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        order = torch.argsort(parent, stable=True)
        parents, sizes = torch.unique_consecutive(parent[order], return_counts=True)
        kids = self.child_table[parents - self.tokens]
        real = kids >= 0
        flat = kids[real]
        # one gather for all groups: the backward pass then scatters into the table once, not once a parent
        rows = F.embedding(flat, self._embedding[0].weight).to(hidden.dtype)
        offset = torch.zeros_like(flat, dtype=torch.float32) if self.bias is None else self.bias[flat].float()
        widths = real.sum(1).tolist()
        groups = zip(hidden[order].split(sizes.tolist()), rows.split(widths), offset.split(widths))
        parts = [F.pad((h @ r.T).float() + b, (0, self.branching - len(r))) for h, r, b in groups]
        return torch.cat(parts)[torch.argsort(order)]


@register("shared")
@dataclass(frozen=True)
class Shared:
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> SharedHead:
        return SharedHead(tree, embedding.embedding_dim)


@register("level")
@dataclass(frozen=True)
class PerLevel:
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> LevelHead:
        return LevelHead(tree, embedding.embedding_dim)


@register("tied")
@dataclass(frozen=True)
class Tied:
    """`bias`: a learned offset per node, started at the unigram model of the training tokens when they are known."""

    bias: bool = True
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> TiedHead:
        head = TiedHead(tree, embedding, self.bias)
        if mass is not None:
            head.start_at(mass)
        return head
