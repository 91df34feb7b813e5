"""The two-step softmax of a flat process: one hidden state names the whole path to a token, level by level.

    log p(x | h)  =  sum over levels l   log p( ancestor[l, x] | ancestor[l+1, x], h )

A position is a token or MASK, never a node in between, so the tree only factors the softmax over the vocabulary: class, then
token, both from the same h. Children are scored as by the tied head, tokens by their input embeddings; inner nodes are
never seen, so their rows are the head's own.

It stands on the star tree (`parent` is always MASK, `slot` the token) and holds the real tree. A token costs its siblings and
its class's; the whole distribution, which sampling asks for, costs all nodes.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..registry import register
from ..rng import sent
from ..tree.tree import Tree
from .head import TiedHead, arranged, weighted_nll, wider
from .kernels.rows import take_parts


class _Steps(TiedHead):
    """The tied head over the backbone's rows of tokens and rows of its own for inner nodes."""

    def __init__(self, tree: Tree, embedding: nn.Embedding):
        super().__init__(tree, embedding, bias=False)
        edge = 1 / math.sqrt(embedding.embedding_dim)  # as the embedding itself begins
        self.inner = nn.Parameter(torch.empty(tree.nodes - tree.size, embedding.embedding_dim).uniform_(-edge, edge))
        self.bias = nn.Parameter(torch.zeros(tree.nodes))
        self._rows, self._embedding = (embedding,), (self,)  # type: ignore[assignment]

    @property
    def weight(self) -> Float[Tensor, "N d"]:
        return torch.cat([self._rows[0].weight[: self.tokens], self.inner])


class Questions(NamedTuple):
    """All steps of some paths, in the order in which the steps' head wants them."""

    order: Int[Tensor, "M"]
    """Of the paths: any will do."""
    row: Int[Tensor, "Q"]
    """Which path a step is of."""
    parent: Int[Tensor, "Q"]
    slot: Int[Tensor, "Q"]
    runs: list[int]
    """How many neighbouring steps are of one level, and so of different paths."""
    steps: Any
    """The steps' own order, or None."""

    def to(self, device: torch.device) -> Questions:
        return self._replace(row=sent(self.row, device), parent=sent(self.parent, device), slot=sent(self.slot, device),
                             steps=None if self.steps is None else self.steps.to(device))


class PathHead(nn.Module):
    ancestor: Int[Tensor, "heights V"]
    slot: Int[Tensor, "H V"]
    choice: Tensor
    over: Int[Tensor, "N"]

    def __init__(self, tree: Tree, embedding: nn.Embedding):
        super().__init__()
        self.branching, self.classes = tree.size, tree.branching * tree.height
        self.steps = _Steps(tree, embedding)
        below, above = tree.ancestor[:-1], tree.ancestor[1:]
        choice = above != below
        over = torch.full_like(tree.num_children, tree.nodes)  # the root hangs under nothing
        over[below[choice]] = above[choice]
        tables = {"ancestor": tree.ancestor, "slot": tree.slot, "choice": choice, "over": over}
        for name, table in tables.items():
            self.register_buffer(name, table.clone(), persistent=False)
        self.known = tuple(table.cpu() for table in (tree.ancestor, tree.slot, choice))  # in a tuple: stays with the processor

    def start_at(self, mass: Float[Tensor, "N"]) -> None:
        """The unigram model: biases at the log mass of every node."""
        self.steps.start_at(mass)

    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """All levels as one question; where a path ends early there is none."""
        place = self.choice[:, slot].flatten().nonzero()[:, 0]
        level, row = place // len(slot), place % len(slot)
        token = slot[row]
        costs = self.steps.nll(hidden[row], self.ancestor[level + 1, token], self.slot[level, token])
        return torch.zeros(len(slot), dtype=costs.dtype, device=costs.device).index_add(0, row, costs)

    def arrange(self, parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Questions:
        ancestor, slots, choice = self.known
        place = choice[:, slot].flatten().nonzero()[:, 0]
        level, row = place // len(slot), place % len(slot)
        token = slot[row]
        above, child = ancestor[level + 1, token], slots[level, token]
        steps = arranged(self.steps, above, child)
        if steps is not None:
            level, row, above, child = (values[steps.order] for values in (level, row, above, child))
        runs = level.unique_consecutive(return_counts=True)[1].tolist()
        return Questions(torch.arange(len(slot)), row, above, child, runs, steps)

    def sorted(self, hidden: Float[Tensor, "M d"], slot: Int[Tensor, "M"], share: Float[Tensor, "M"],
               order: Questions) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """(sum of share x nll, nll), and nothing waits for the device."""
        steps = take_parts(hidden, order.row, order.runs)
        total, costs = weighted_nll(self.steps, steps, order.parent, order.slot, share[order.row], order.steps)
        return total, torch.zeros(len(hidden), dtype=costs.dtype, device=costs.device).index_add(0, order.row, costs)

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M V"]:
        """Of every node its score less the log of the sum over its siblings; of a token the sum along its path."""
        rows = self.steps.weight
        scores = wider(hidden @ rows.to(hidden.dtype).T) + self.steps.bias
        family = self.over.expand_as(scores)
        empty = scores.new_full((len(scores), len(rows) + 1), -torch.inf)
        scores = scores - empty.scatter_reduce(1, family, scores.detach(), "amax").gather(1, family)
        sums = torch.zeros_like(empty).scatter_add(1, family, scores.exp())
        single = scores - sums.gather(1, family).log()
        steps = [single[:, node].masked_fill(~choice, 0) for node, choice in zip(self.ancestor, self.choice)]
        return torch.stack(steps).sum(0)


@register("path")
@dataclass(frozen=True)
class Path:
    """A head that answers for whole paths; the methods that ask step by step cannot have it."""

    role = "path head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> PathHead:
        head = PathHead(tree, embedding)
        if mass is not None:
            head.start_at(mass)
        return head
