"""Left-to-right models, the autoregressive rivals: `ar` over the tokens, `ar-tree` down the vocabulary tree.

Position i sees the tokens before it; the first one sees the root's id, "nothing seen yet". Its token is named by the way
down to it from the root, with one answer of the network for all levels:

    -log p(x_i | x_<i)  =  sum over levels l  -log p( ancestor[l, x_i] | ancestor[l+1, x_i], hidden_i )
    -log p(x)           =  sum over positions i of that

which is a hierarchical softmax. On the star tree there is one level and it is the ordinary softmax: `ar`. Steps without
a choice (padded paths) cost nothing. Nothing is drawn: the number is -log p(x) itself and needs no repeats.

In `ar-tree` the network has not seen which nodes the path goes through, so only a head with weights of its own for every
child (`tied`, the default) can say different things below different nodes; `shared` and `level` give slot k of all nodes
of a level the same score. In `ar` the root is the only node and `shared` is the usual untied output matrix.

PAD (it stands behind the text only):

  count   PAD is a token like any other: its terms are trained and counted, and the number is -log p(x), PADs included.
  drop    PAD is left out of training and of the number, as in the baselines' loss over the attention mask. The number is
          then -log of the probability that a text *begins* with these tokens, since whatever follows them sums to one. It
          is exact, but at most -log p(x): *not a bound*. What it lacks is the cost of saying that the text is over, which
          is small where every text ends with EOS. A model trained so has never seen what follows the end.
  given-length has no honest value here and is refused: p(x | length) = p(x) / p(length), and p(length) is a sum over all
          texts of that length. (Diffusion shows PADs from the start; a left-to-right model meets the length last.)

Training minimises the mean over all B x S positions; under `drop` the PAD positions add nothing to that sum. (The baseline
divides by the number of real tokens, which scales the gradient by a number close to constant, and it does not score
the first token.)
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from ..model.head import Shared, Tied, takes_all, weighted_nll
from ..model.kernels.rows import take_parts
from ..model.model import Network
from ..registry import register
from ..rng import Draws
from ..sample.causal import generate_left_to_right
from ..sample.draw import Sampled
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, Places, by_row, choose_sampler, delivered, is_pad, ordered


@register("ar")
@dataclass(frozen=True)
class Autoregressive:
    """One softmax over the vocabulary per token."""

    head: Any = field(default_factory=Shared)
    pad: Literal["count", "drop"] = "count"
    role = "method"
    flat = True
    causal = True

    def objective(self, tree: Tree, pad_id: int | None) -> AutoregressiveObjective:
        return AutoregressiveObjective(tree, pad_id, self.pad)


@register("ar-tree")
@dataclass(frozen=True)
class AutoregressiveTree:
    """One softmax over the children per level and token."""

    head: Any = field(default_factory=Tied)
    pad: Literal["count", "drop"] = "count"
    role = "method"
    flat = False
    causal = True

    def objective(self, tree: Tree, pad_id: int | None) -> AutoregressiveObjective:
        return AutoregressiveObjective(tree, pad_id, self.pad)


class Sheet(NamedTuple):
    """What the network is shown and asked, in the order its head wants."""

    nodes: Int[Tensor, "B S"]
    every: bool
    """Whether all positions are asked about at all levels, level by level."""
    runs: list[int] | None
    """How many neighbouring questions are of one level, where the processor knows it."""
    place: Int[Tensor, "M"]
    """Positions counted through the batch."""
    cell: Int[Tensor, "M"]
    """Row and level."""
    parent: Int[Tensor, "M"]
    slot: Int[Tensor, "M"]
    tokens: Int[Tensor, "B"]
    order: Any
    """The head's own (`head.arranged`), or None."""


class AutoregressiveObjective:
    causal = True
    prepares = True
    knows_level = False
    samplers = ("ancestral",)

    def __init__(self, tree: Tree, pad_id: int | None, pad: Pad):
        if pad == "given-length":
            raise ConfigError("a left-to-right model meets the length last, so it has no likelihood given the length; "
                              "use the PAD mode count, or drop to leave PAD out")
        self.tree, self.pad_id, self.pad = tree, pad_id, pad
        self.num_states, self.levels = tree.nodes, tree.height
        self.known = tree.to("cpu") if tree.ancestor.is_cuda else None

    def with_pad(self, pad: Pad) -> AutoregressiveObjective:
        return AutoregressiveObjective(self.tree, self.pad_id, pad)

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def estimators(self, model: Network) -> dict[str, Estimator]:
        return {"exact": self.loss}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        return self.complete(model, self.prepare(model.head, tokens, draws))

    def prepare(self, head: Any, tokens: Int[Tensor, "B S"], draws: Draws) -> Sheet:
        """Everything of `loss` that does not depend on the network, where the tokens are; for draws.device."""
        tree, pad = self.tables(tokens), is_pad(tokens, self.pad_id)
        parent = tree.ancestor[1:, tokens]
        choices = tree.num_children[parent] > 1
        if self.pad == "drop":
            choices = choices & ~pad
        start = torch.full_like(tokens[:, :1], tree.root)
        # of all positions and levels, where nothing is left out or the head makes nothing of steps without a choice
        places = Places(choices, every=self.pad != "drop" and (self.levels == 1 or takes_all(head, tokens)))
        order = ordered(head, places.of(parent), places.of(tree.slot[:, tokens]), draws.device)
        if order is not None and not places.every:  # all of one level have one parent, and lie sorted
            places.sort(order.order)
        level, row, column = places.index
        runs = None if places.every or tokens.is_cuda else level.unique_consecutive(return_counts=True)[1].tolist()
        return delivered(Sheet(
            torch.cat([start, tokens[:, :-1]], 1), places.every, runs, row * tokens.shape[1] + column, row * self.levels + level,
            places.of(parent), places.of(tree.slot[:, tokens]), (~pad).sum(1), order), draws.device)

    def complete(self, model: Network, sheet: Sheet) -> Loss:
        B, S = sheet.nodes.shape
        no_time = torch.zeros(B, dtype=torch.float64, device=sheet.nodes.device)
        hidden = model.hidden(sheet.nodes, no_time, None)
        share = torch.full_like(sheet.cell, 1 / (B * S), dtype=torch.float64)
        train, nll = weighted_nll(model.head, self.here(hidden, sheet), sheet.parent, sheet.slot, share, sheet.order)
        levels = by_row(sheet.cell, nll, B * self.levels).view(-1, self.levels)
        return Loss(train, levels.sum(1), {"levels": levels, "tokens": sheet.tokens})

    def here(self, hidden: Float[Tensor, "B S d"], sheet: Sheet) -> Float[Tensor, "M d"]:
        """The answers of the positions that are scored; every level asks the same one."""
        if sheet.every:
            return hidden.expand(self.levels, -1, -1, -1).flatten(0, 2)
        rows = hidden.flatten(0, 1)
        return rows[sheet.place] if sheet.runs is None else take_parts(rows, sheet.place, sheet.runs)

    def tables(self, like: Tensor) -> Tree:
        """The tree where `like` lies."""
        return self.known if self.known is not None and not like.is_cuda else self.tree

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        choose_sampler(self.samplers, sampler)
        return generate_left_to_right(model, self.tree, shape, steps=steps, draws=draws, prefix=prefix, **options)
