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
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..registry import register
from ..tree.tree import Tree
from .kernels.few import few_logits, narrowed
from .kernels.grouped import Arrangement, Groups, grouped_nll
from .kernels.linear_ce import linear_cross_entropy
from .kernels.sorted_ce import limited_cross_entropy, sorted_cross_entropy
from .transformer import zeroed

WIDE = 4096
"""From so many outputs on, logits are made some rows at a time and never kept; below, they are small."""
FEW = 16
"""Up to so many children, a position gathers their rows; above, positions of one parent share a product."""


@runtime_checkable
class Head(Protocol):
    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """-log p(slot | hidden, parent), float32."""
        ...

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M K"]:
        """log p over all slots, -inf where the parent has no child."""
        ...


def arranged(head: Head, parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Any:
    """The order in which a head wants positions whose questions the processor knows (`order.order`), with what `sorted` needs
    besides (`order.to` brings it to a GPU); None for a head that takes any."""
    arrange = getattr(head, "arrange", None)
    return None if arrange is None else arrange(parent, slot)


def weighted_nll(head: Head, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"],
                 share: Float[Tensor, "M"], order: Any = None) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """(sum of share x nll, which is differentiated; nll, which is published). A head that knows the shares in advance may
    make its gradients while it has the logits, and offers `weighted` for it. `order`: positions lie as `arranged` says."""
    if order is not None:
        return head.sorted(hidden, slot, share, order)  # type: ignore[attr-defined, no-any-return]
    fused = getattr(head, "weighted", None)
    if fused is not None:
        return fused(hidden, parent, slot, share)
    nll = head.nll(hidden, parent, slot)
    return (nll * share.to(nll.dtype)).sum(), nll.detach()


def takes_all(head: Head, hidden: Tensor) -> bool:
    """Whether every position may be handed to the head, active or not (its nll is 0 where a node has one child). On a GPU
    a cheap head costs less than finding out how many positions are active, for which the processor waits."""
    return hidden.is_cuda and getattr(head, "cheap", False)


def wider(logits: Tensor) -> Tensor:
    """At least float32: bfloat16 products are summed wider, the proofs' float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Head(nn.Module):
    """What the heads share: the tree's tables as buffers (not saved: the tree has its own file) and the masked softmax."""

    num_children: Tensor

    def __init__(self, tree: Tree):
        super().__init__()
        self.tokens, self.branching = tree.size, tree.branching
        self.cheap = tree.branching < WIDE
        self.flat = tree.nodes == tree.size + 1
        self.register_buffer("num_children", tree.num_children.clone(), persistent=False)

    def wide(self) -> tuple[Tensor, Tensor | None, int | None] | None:
        """Matrix, bias and real rows of a flat head whose logits are too many to keep; None for all others."""
        return None

    def kept_by_nobody(self) -> tuple[Tensor, Tensor | None, int | None] | None:
        """`wide` where logits are made some rows at a time."""
        return self.wide() if self.flat and not self.cheap else None

    def weighted(self, hidden: Tensor, parent: Tensor, slot: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        matrix = self.kept_by_nobody()
        if matrix is None:
            nll = self.nll(hidden, parent, slot)
            return (nll * share.to(nll.dtype)).sum(), nll.detach()
        weight, bias, classes = matrix
        return linear_cross_entropy(hidden, weight, bias, self.column(slot), share, classes)

    def column(self, slot: Tensor) -> Tensor:
        """The row of `wide`'s matrix that scores a child of the root."""
        return slot

    def masked(self, logits: Tensor, parent: Tensor) -> Tensor:
        slots = torch.arange(self.branching, device=parent.device)
        return wider(logits).masked_fill(slots >= self.num_children[parent][:, None], -torch.inf)

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

    def wide(self) -> tuple[Tensor, Tensor | None, int | None]:
        return self.output.weight, self.output.bias, None

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return self.output(hidden)

    def weighted(self, hidden: Tensor, parent: Tensor, slot: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        if self.cheap and hidden.is_cuda and torch.is_grad_enabled():
            return limited_cross_entropy(hidden, self.output.weight, self.output.bias, parent, self.num_children, slot, share)
        return super().weighted(hidden, parent, slot, share)


class LevelHead(_Head):
    """Positions are sorted by level and each level takes its own matrix."""

    level: Tensor

    def __init__(self, tree: Tree, width: int):
        super().__init__(tree)
        self.cheap = False  # how many positions each level has must be known anyway
        self.outputs = nn.ModuleList(zeroed(nn.Linear(width, tree.branching)) for _ in range(tree.height))
        self.register_buffer("level", (tree.node_height() - 1).clamp(min=0), persistent=False)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        level = self.level[parent]
        order = torch.argsort(level, stable=True)
        counts = torch.bincount(level, minlength=len(self.outputs)).tolist()
        parts = [output(part) for output, part in zip(self.outputs, hidden[order].split(counts))]
        return torch.cat(parts)[torch.argsort(order)]


class TiedHead(_Head):
    """Positions are sorted by parent; each group meets the rows of its own children only. (`logits` group by group; on a
    GPU `nll` takes one grouped product a level, `kernels/grouped.py`.)"""

    child_table: Tensor

    def __init__(self, tree: Tree, embedding: nn.Embedding, bias: bool = True):
        super().__init__(tree)
        self._embedding = (embedding,)  # in a tuple: the backbone owns the parameter, saving it twice would be wrong
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings)) if bias else None
        self.register_buffer("child_table", tree.children.clone(), persistent=False)
        self.in_order = self.flat and torch.equal(tree.children[0], torch.arange(tree.size, device=tree.children.device))
        self.groups = Groups(tree) if FEW < tree.branching < WIDE else None

    def start_at(self, mass: Float[Tensor, "N"]) -> None:
        """Biases at the log unigram mass of each node (counts are smoothed, so an unseen token keeps a finite one)."""
        if self.bias is not None:
            with torch.no_grad():
                self.bias[: len(mass)] = torch.log(mass / mass.max()).to(self.bias)

    def wide(self) -> tuple[Tensor, Tensor | None, int | None]:
        return self._embedding[0].weight, self.bias, self.tokens

    def column(self, slot: Tensor) -> Tensor:
        return self.child_table[0][slot]

    def arrange(self, parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Arrangement | None:
        return None if self.groups is None else self.groups.arrange(parent)

    def sorted(self, hidden: Float[Tensor, "M d"], slot: Int[Tensor, "M"], share: Float[Tensor, "M"],
               order: Arrangement) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """`weighted` of positions that lie in the order of the groups."""
        assert self.groups is not None
        return sorted_cross_entropy(hidden, self._embedding[0].weight, self.bias, slot, share, order.group, order.ends,
                                    order.bounds, self.groups)

    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        if hidden.is_cuda and self.groups is not None:
            return grouped_nll(hidden, parent, slot, self._embedding[0].weight, self.bias, self.groups)
        return super().nll(hidden, parent, slot)

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        if self.flat:
            return self._rooted(hidden)
        if self.groups is not None and hidden.is_cuda and not torch.is_grad_enabled():
            return few_logits(hidden, parent, self._embedding[0].weight, self.bias, self.child_table, self.tokens)
        return self._gathered(hidden, parent) if self.branching <= FEW else self._by_parent(hidden, parent)

    def _rooted(self, hidden: Tensor) -> Tensor:
        """One parent: a plain product with the rows of its children, which mostly are the first rows as they stand."""
        kids, weight = self.child_table[0], self._embedding[0].weight
        if self.in_order:  # with the few rows behind them, which is less than taking the table apart
            logits = wider(F.linear(hidden, narrowed(weight, hidden))[:, : self.tokens])
            return logits if self.bias is None else logits + self.bias[: self.tokens]
        logits = wider(hidden @ F.embedding(kids, weight).to(hidden.dtype).T)
        return logits if self.bias is None else logits + self.bias[kids]

    def _gathered(self, hidden: Tensor, parent: Tensor) -> Tensor:
        """Every position its own few rows (a token stands for itself)."""
        inner = (parent - self.tokens).clamp(min=0)
        kids = self.child_table[inner].clamp(min=0)
        rows = F.embedding(kids, self._embedding[0].weight).to(hidden.dtype)
        logits = wider(torch.einsum("md,mkd->mk", hidden, rows))
        return logits if self.bias is None else logits + self.bias[kids]

    def _by_parent(self, hidden: Tensor, parent: Tensor) -> Tensor:
        order = torch.argsort(parent, stable=True)
        parents, sizes = torch.unique_consecutive(parent[order], return_counts=True)
        kids = self.child_table[parents - self.tokens]
        real = kids >= 0
        flat = kids[real]
        # one gather for all groups: the backward pass then scatters into the table once, not once a parent
        rows = F.embedding(flat, self._embedding[0].weight).to(hidden.dtype)
        offset = torch.zeros_like(flat, dtype=torch.float32) if self.bias is None else self.bias[flat]
        widths = real.sum(1).tolist()
        groups = zip(hidden[order].split(sizes.tolist()), rows.split(widths), offset.split(widths))
        parts = [F.pad(wider(h @ r.T) + b, (0, self.branching - len(r))) for h, r, b in groups]
        return torch.cat([wider(hidden[:0, :1]).expand(-1, self.branching), *parts])[torch.argsort(order)]


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
