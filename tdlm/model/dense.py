"""The dense head: one logit for every token, whatever the tree; a child is as likely as the tokens below it together.

With leaves(u) the tokens below a node u and logits l_v = h . W[v] + b[v],

    log p(child c of u | h)  =  logsumexp over leaves(c) of l  -  logsumexp over leaves(u) of l,

so one distribution over the vocabulary answers at every height (the hierarchical baseline's head), and on the star tree
this is the shared head. Tokens are put into the order of the leaves from left to right, in which the tokens below any
node are one stretch: a node meets the rows of its own stretch only, and its children are pieces of that stretch.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..registry import register
from ..tree.tree import Tree
from .head import WIDE, wider
from .kernels.grouped import Arrangement, Groups, grouped_nll
from .kernels.linear_ce import linear_cross_entropy
from .kernels.rows import take
from .kernels.sorted_ce import sorted_cross_entropy


def leaf_order(tree: Tree) -> Int[Tensor, "V"]:
    """The tokens from left to right: sorted by the slots of their paths, the topmost slot first."""
    order = torch.arange(tree.size, device=tree.slot.device)
    for slot in tree.slot:
        order = order[torch.argsort(slot[order], stable=True)]
    return order


def stretches(tree: Tree, order: Int[Tensor, "V"]) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
    """First place and end (one past the last place) of every node's tokens in the order of the leaves."""
    place = torch.argsort(order)
    first = torch.full((tree.nodes,), tree.size, device=order.device)
    for above in tree.ancestor:
        first.scatter_reduce_(0, above, place, "amin")
    return first, first + tree.leaf_counts()


class DenseHead(nn.Module):
    """Positions are sorted by parent; each group meets the tokens below its parent."""

    order: Tensor
    first: Tensor
    end: Tensor
    height: Tensor
    rank: Tensor
    child_table: Tensor

    def __init__(self, tree: Tree, width: int, embedding: nn.Embedding | None = None):
        super().__init__()
        self.tokens, self.branching, self.classes = tree.size, tree.branching, tree.size
        if embedding is None:
            self.weight = nn.Parameter(torch.zeros(tree.size, width))
        # in a tuple: the backbone owns the parameter, saving it twice would be wrong
        self._tied: tuple[nn.Embedding, ...] = () if embedding is None else (embedding,)
        self.bias = nn.Parameter(torch.zeros(tree.size))
        order = leaf_order(tree)
        first, end = stretches(tree, order)
        self.clusters = Groups(tree, highest=1) if tree.height == 2 else None
        height = tree.node_height()
        rank = torch.argsort(torch.argsort(height * tree.size + first))  # height by height, from left to right
        tables = {"order": order, "first": first, "end": end, "height": height, "rank": rank,
                  "child_table": tree.children.clone()}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def start_at(self, mass: Float[Tensor, "N"]) -> None:
        """Biases at the log unigram mass of each token (counts are smoothed, so an unseen token keeps a finite one)."""
        with torch.no_grad():
            self.bias.copy_(torch.log(mass / mass.max())[: self.tokens])

    def token_log_probs(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        """log p over all tokens, by token id."""
        return _logits(hidden, self._matrix(), self.bias).log_softmax(-1)

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M K"]:
        order = torch.argsort(self.rank[parent], stable=True)
        parts = [wider(hidden[:0, :1]).expand(-1, self.branching)]
        for node, logits in self._groups(hidden[order], parent[order]):
            kids = self.child_table[node - self.tokens]
            sizes = (self.end - self.first)[kids[kids >= 0]].tolist()
            if len(sizes) < logits.shape[1]:
                logits = torch.stack([piece.logsumexp(-1) for piece in logits.split(sizes, -1)], -1)
            parts.append(F.pad(logits.log_softmax(-1), (0, self.branching - len(sizes)), value=-torch.inf))
        return torch.cat(parts)[torch.argsort(order)]

    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        return -self.log_probs(hidden, parent).gather(1, slot[:, None])[:, 0]

    def weighted(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"],
                 share: Float[Tensor, "M"]) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """(sum of share x nll, nll) for two levels over a large vocabulary: the clusters of MASK without keeping all logits,
        the tokens of all clusters as one grouped product."""
        if self.clusters is None or self.tokens < WIDE or hidden.dtype == torch.float64:  # there is no grouped product in float64
            nll = self.nll(hidden, parent, slot)
            return (nll * share.to(nll.dtype)).sum(), nll.detach()
        root = parent == len(self.first) - 1
        row = root.nonzero()[:, 0]
        total, top = self._top(hidden[row], slot[row], share[row])
        low = grouped_nll(hidden, parent, slot, self._matrix(), self.bias, self.clusters)
        low = low.masked_fill(root, 0)
        nll = low.detach().index_copy(0, row, top.to(low.dtype))
        return total + (low * share.to(low.dtype)).sum(), nll

    def arrange(self, parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Arrangement | None:
        """Two levels: the clusters one after another, behind them MASK."""
        return None if self.clusters is None else self.clusters.arrange(parent)

    def sorted(self, hidden: Float[Tensor, "M d"], slot: Int[Tensor, "M"], share: Float[Tensor, "M"],
               order: Arrangement) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """`weighted` of positions that lie in this order: nothing waits for the device."""
        assert self.clusters is not None
        edge = order.bounds[-1]
        total, top = self._top(hidden[edge:], slot[edge:], share[edge:])
        below, low = sorted_cross_entropy(hidden[:edge], self._matrix(), self.bias, slot[:edge], share[:edge], order.group[:edge],
                                          order.ends, order.bounds, self.clusters)
        return total + below, torch.cat([low, top.to(low.dtype)])

    def _top(self, hidden: Float[Tensor, "M d"], slot: Int[Tensor, "M"],
             share: Float[Tensor, "M"]) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """The root's children, each a stretch of the tokens from left to right."""
        child = self.child_table[-1][slot]
        matrix, bias = take(self._matrix(), self.order), take(self.bias[:, None], self.order)[:, 0]
        return linear_cross_entropy(hidden, matrix, bias, self.first[child], share, until=self.end[child])

    def _groups(self, hidden: Tensor, parent: Tensor) -> Iterator[tuple[int, Tensor]]:
        """For each run of equal parents: the node and the logits (m, n) of the n tokens below it.

        The runs come height by height and from left to right, so the stretches of one height do not overlap and are cut
        out of the rows at once: the backward pass then writes one gradient a height, not one a node.
        """
        nodes, sizes = torch.unique_consecutive(parent, return_counts=True)
        rows, bias = F.embedding(self.order, self._matrix()), self.bias[self.order]
        runs = torch.stack([self.height[nodes], nodes, self.first[nodes], self.end[nodes]], 1).tolist()
        groups = iter(hidden.split(sizes.tolist()))
        for _, level in itertools.groupby(runs, key=lambda run: run[0]):
            level = list(level)
            edges = [0, *(edge for _, _, low, high in level for edge in (low, high)), self.tokens]
            widths = [b - a for a, b in itertools.pairwise(edges)]  # every second piece is a stretch, the others lie between
            for (_, node, _, _), matrix, offset in zip(level, rows.split(widths)[1::2], bias.split(widths)[1::2]):
                yield node, _logits(next(groups), matrix, offset)

    def _matrix(self) -> Tensor:
        return self._tied[0].weight[: self.tokens] if self._tied else self.weight


def _logits(hidden: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    return wider(hidden @ rows.to(hidden.dtype).T) + bias


@register("dense")
@dataclass(frozen=True)
class Dense:
    """`tied`: the tokens' rows of the input embedding are the output matrix, and the biases start at the unigram model of
    the training tokens when they are known. Untied, matrix and biases are the head's own and start at zero."""

    tied: bool = False
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> DenseHead:
        head = DenseHead(tree, embedding.embedding_dim, embedding if self.tied else None)
        if self.tied and mass is not None:
            head.start_at(mass)
        return head
