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
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import ConfigError
from ..model.head import Shared, Tied, takes_all, weighted_nll
from ..model.model import Network
from ..registry import register
from ..rng import Draws
from ..sample.causal import generate_left_to_right
from ..sample.draw import Sampled
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, Places, by_row, choose_sampler, is_pad


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


class AutoregressiveObjective:
    causal = True
    knows_level = False
    samplers = ("ancestral",)

    def __init__(self, tree: Tree, pad_id: int | None, pad: Pad):
        if pad == "given-length":
            raise ConfigError("a left-to-right model meets the length last, so it has no likelihood given the length; "
                              "use the PAD mode count, or drop to leave PAD out")
        self.tree, self.pad_id, self.pad = tree, pad_id, pad
        self.num_states, self.levels = tree.nodes, tree.height

    def with_pad(self, pad: Pad) -> AutoregressiveObjective:
        return AutoregressiveObjective(self.tree, self.pad_id, pad)

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def estimators(self, model: Network) -> dict[str, Estimator]:
        return {"exact": self.loss}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        pad = is_pad(tokens, self.pad_id)
        parent = self.tree.ancestor[1:, tokens]
        choices = self.tree.num_children[parent] > 1
        if self.pad == "drop":
            choices = choices & ~pad
        start = torch.full_like(tokens[:, :1], self.tree.root)
        no_time = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        hidden = model.hidden(torch.cat([start, tokens[:, :-1]], 1), no_time, None)
        # of all positions and levels, where nothing is left out or the head makes nothing of steps without a choice
        places = Places(choices, every=self.pad != "drop" and (self.levels == 1 or takes_all(model.head, hidden)))
        level, row, column = places.index
        here = hidden.expand(self.levels, -1, -1, -1).flatten(0, 2) if places.every else hidden[row, column]
        share = torch.full_like(row, 1 / tokens.numel(), dtype=torch.float64)
        train, nll = weighted_nll(model.head, here, places.of(parent), places.of(self.tree.slot[:, tokens]), share)
        levels = by_row(row * self.levels + level, nll, len(tokens) * self.levels).view(-1, self.levels)
        return Loss(train, levels.sum(1), {"levels": levels, "tokens": (~pad).sum(1)})

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        choose_sampler(self.samplers, sampler)
        return generate_left_to_right(model, self.tree, shape, steps=steps, draws=draws, prefix=prefix, **options)
