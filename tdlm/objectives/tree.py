"""The tree-structured diffusion language model (the paper): loss and bound.

A sequence is corrupted by climbing its tokens' paths (`process/`); at every active position the network predicts which
child of the visible node leads to the token. With CE the cross-entropy over the children,

    bound  =  sum over active positions  lambda_l w_l / w_{l+1}  CE          (unbiased; never clipped or reweighted)
    train  =  mean over all positions of  clipped weight x level weight x CE

Clipping is in local time, the factor 1 / (t_{l+1} - t_l) of drawing t over all levels stays outside of it. (In global
time with linear alpha the weight is H/u >= H, so the paper's clip of 2.0 would make it constant.) Denominators are
floored nowhere in the bound; `clip` bounds the train weight, which floors its denominator as the paper's 1e-4 does.

PAD: `count` corrupts PAD like any token and counts its terms over the real tokens (bounds -log p(x)); `given-length`
shows PAD always (bounds -log p(x | length)); `drop`, for comparison, corrupts PAD and leaves its terms out (the paper
and its baseline): *not a bound*, since visible PADs leak the length. Rows without PAD are `pack` under any of them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from ..model.head import Shared
from ..model.model import Network
from ..process import Cascade, Moment, corrupt
from ..registry import register
from ..rng import Draws
from ..sample import Sampled, generate
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, by_row, choose_sampler, is_pad


def level_weights(kind: str, gamma: float, height: int) -> Float[Tensor, "H"]:
    """The paper's training weights by level (l = 0 at the leaves), divided by their mean over levels."""
    level = torch.arange(height, dtype=torch.float64)
    if kind == "exponential":
        weights = torch.exp(gamma * level)
    elif kind == "linear" and height > 1:
        weights = 1 + gamma * level / (height - 1)
    else:
        weights = torch.ones_like(level)
    return weights / weights.mean()


@register("tree")
@dataclass(frozen=True)
class TreeMethod:
    """The choices of the method: process, head, and what only training sees."""

    process: Any = field(default_factory=Cascade)
    head: Any = field(default_factory=Shared)
    pad: Literal["count", "given-length"] = "count"
    clip: float | None = 2.0
    level_weights: Literal["none", "linear", "exponential"] = "none"
    level_gamma: float = 0.0
    role = "method"
    flat = False
    causal = False

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"method.clip must be positive or none, got {self.clip}")
        if not math.isfinite(self.level_gamma) or (self.level_weights == "linear" and self.level_gamma <= -1):
            raise ConfigError(f"method.level_gamma must keep every weight positive, got {self.level_gamma}")
        if self.level_weights == "none" and self.level_gamma:
            raise ConfigError("method.level_gamma has no effect while method.level_weights is none; set both or neither")

    def objective(self, tree: Tree, pad_id: int | None) -> TreeObjective:
        return TreeObjective(self, tree, pad_id)


class TreeObjective:
    causal = False
    samplers = ("ancestral",)

    def __init__(self, method: TreeMethod, tree: Tree, pad_id: int | None):
        self.method, self.process, self.tree, self.pad_id = method, method.process, tree, pad_id
        self.pad: Pad = method.pad
        self.knows_level = method.process.knows_level
        self.num_states, self.levels = tree.nodes, tree.height
        weights = level_weights(method.level_weights, method.level_gamma, tree.height)
        self.level_weights = weights.to(tree.ancestor.device)
        if isinstance(self.process, Cascade):
            self.process.edges(tree.height)  # thresholds must fit this tree: say so now, not at the first step

    def with_pad(self, pad: Pad) -> TreeObjective:
        """The same objective under another PAD mode (evaluation may ask for any; training for those of the method)."""
        other = TreeObjective(replace(self.method), self.tree, self.pad_id)
        other.pad = pad
        return other

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def estimators(self, model: Network) -> dict[str, Estimator]:
        sampled: dict[str, Estimator] = {"sampled": self.loss}
        return sampled if model.told_time or not self.knows_level else {"count": self.exact_count_loss, **sampled}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        moment = self.process.moment(draws.strata("time"), self.tree.height, self.method.clip)
        heights = corrupt(moment, draws.uniform("state", tokens.shape[1]))
        return self.score(model, tokens, heights, moment)

    def score(self, model: Network, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"], moment: Moment) -> Loss:
        """The loss of given states: everything of `loss` but the drawing."""
        pad = is_pad(tokens, self.pad_id)
        if self.pad == "given-length":
            heights = heights.masked_fill(pad, 0)
        row, column, level, nll = self._cross_entropies(model, tokens, heights, moment)
        counted = nll if self.pad != "drop" else nll.masked_fill(pad[row, column], 0)
        cell, cells = row * self.levels + level, len(tokens) * self.levels
        bound = by_row(cell, counted.double() * moment.weight[row, level], cells).view(-1, self.levels)
        weight = moment.train_weight[row, level] * self.level_weights[level]
        train = (nll * weight.to(nll.dtype)).sum() / tokens.numel()
        return Loss(train, bound.sum(1), {"levels": bound, "tokens": (~pad).sum(1)})

    def _cross_entropies(self, model: Network, tokens: Tensor, heights: Tensor,
                         moment: Moment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row, column, level and cross-entropy of every active position.

        A position is active when its node has a choice of children *and* its level carries weight now: in the cascade
        a position that has not yet left the child state of a higher level is an inner node too, but has nothing to predict.
        """
        nodes = self.tree.ancestor[heights, tokens]
        carries = (moment.weight > 0).gather(1, (heights - 1).clamp(min=0)) & (heights > 0)
        row, column = (carries & (self.tree.num_children[nodes] > 1)).nonzero(as_tuple=True)
        hidden = model.hidden(nodes, moment.time, moment.level)
        level = heights[row, column] - 1
        slot = self.tree.slot[level, tokens[row, column]]
        return row, column, level, model.head.nll(hidden[row, column], nodes[row, column], slot)

    def exact_count_loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        """The low-variance estimate of the same bound: one uniform *count* of masked positions per level.

        Cascade only, and only for a network that is not told t; any alpha. For each level, with n active-eligible
        positions, k ~ U{1..n} of them stand in the parent state and the level's term is n times their mean
        cross-entropy. Positions that are not eligible (one child) stand in the parent state when their own uniform
        lies below the k-th smallest of the eligible ones, which is exactly their law given k.
        """
        pad, bounds = is_pad(tokens, self.pad_id), []
        for level in range(self.levels):
            eligible = self.tree.num_children[self.tree.ancestor[level + 1][tokens]] > 1
            if self.pad == "given-length":
                eligible = eligible & ~pad
            n = eligible.sum(1)
            k = (1 + draws.strata(f"count {level}") * n).long().clamp(max=n.clamp(min=1))
            uniform = draws.uniform(f"order {level}", tokens.shape[1])
            ordered = uniform.masked_fill(~eligible, 2.0).sort(1).values
            threshold = ordered.gather(1, (k - 1)[:, None]).masked_fill((n == 0)[:, None], -1.0)
            heights = level + (uniform <= threshold).long()
            if self.pad == "given-length":
                heights = heights.masked_fill(pad, 0)
            middle = torch.full((len(tokens),), (level + 0.5) / self.levels, dtype=torch.float64, device=tokens.device)
            carries = torch.zeros(len(tokens), self.levels, device=tokens.device)
            carries[:, level] = 1
            moment = Moment(middle, torch.full_like(k, level), carries, carries, carries)
            row, column, _, nll = self._cross_entropies(model, tokens, heights, moment)
            if self.pad == "drop":
                nll = nll.masked_fill(pad[row, column], 0)
            bounds.append(by_row(row, nll, len(tokens)) * n / k)
        levels = torch.stack(bounds, 1)
        return Loss(levels.sum() / tokens.numel(), levels.sum(1), {"levels": levels, "tokens": (~pad).sum(1)})

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        choose_sampler(self.samplers, sampler)
        return generate(model, self.process, self.tree, shape, steps=steps, draws=draws, prefix=prefix, **options)
