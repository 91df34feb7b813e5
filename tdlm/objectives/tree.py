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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ConfigError
from ..model.head import Shared, weighted_nll
from ..model.kernels.rows import take
from ..model.model import Network
from ..process import Cascade, Moment, corrupt
from ..registry import register
from ..rng import Draws, sent
from ..sample import Sampled, confidence, first_hitting, generate
from ..sample.walk import Alone, Reader, from_units, in_units
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, by_row, choose_sampler, delivered, in_pad_mode, is_pad, ordered


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


@dataclass(frozen=True)
class Terms:
    """The cross-entropies of given states."""

    row: Int[Tensor, "M"]
    level: Int[Tensor, "M"]
    cost: Float[Tensor, "M"]
    """What each adds to the bound before its weight, under the PAD mode."""
    train: Float[Tensor, ""]


class Sheet(NamedTuple):
    """What the network is shown and asked, in the order its head wants, and with which weights."""

    moment: Moment
    nodes: Int[Tensor, "B S"]
    place: Int[Tensor, "M"]
    """Active positions, counted through the batch."""
    parent: Int[Tensor, "M"]
    row: Int[Tensor, "M"]
    level: Int[Tensor, "M"]
    slot: Int[Tensor, "M"]
    share: Float[Tensor, "M"]
    unseen: Bool[Tensor, "M"] | None
    """Terms that are left out."""
    tokens: Int[Tensor, "B"]
    """Real tokens."""
    order: Any
    """The head's own (`head.arranged`), or None."""


SAMPLERS: dict[str, Callable[..., Sampled]] = {"ancestral": generate, "first-hitting": first_hitting,
                                               "confidence": confidence}


class TreeObjective:
    causal = False
    prepares = True
    """Whether the processor can make its part of the loss beforehand (`prepare`, then `complete`)."""
    samplers = tuple(SAMPLERS)
    unit = 1
    """Positions that are corrupted as one."""
    reader: Reader = Alone()

    def __init__(self, method: TreeMethod, tree: Tree, pad_id: int | None):
        self.method, self.process, self.tree, self.pad_id = method, method.process, tree, pad_id
        self.pad: Pad = method.pad
        self.knows_level = method.process.knows_level
        self.num_states, self.levels = tree.nodes, tree.height
        self.known = tree.to("cpu") if tree.ancestor.is_cuda else None
        self.level_weights = level_weights(method.level_weights, method.level_gamma, tree.height)
        # a process that does not fit this tree says so now, not at the first step
        self.process.occupancy(torch.zeros(1, dtype=torch.float64, device="cpu"), tree.height)

    def with_pad(self, pad: Pad) -> TreeObjective:
        return in_pad_mode(self, pad)

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def estimators(self, model: Network) -> dict[str, Estimator]:
        sampled: dict[str, Estimator] = {"sampled": self.loss}
        return sampled if model.told_time or not self.knows_level else {"count": self.exact_count_loss, **sampled}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        return self.score(model, tokens, *self.draw(tokens, draws), draws.device)

    def draw(self, tokens: Int[Tensor, "B S"], draws: Draws) -> tuple[Int[Tensor, "B S"], Moment]:
        """Heights and times, where rows are numbered."""
        here, length = draws.here(), tokens.shape[1]
        moment = self.process.moment(here.strata("time"), self.tree.height, self.method.clip)
        heights = corrupt(moment, here.uniform("state", -(-length // self.unit)))
        return from_units(heights, self.unit, length), moment

    def score(self, model: Network, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"], moment: Moment,
              device: torch.device | None = None) -> Loss:
        """The loss of given states: everything of `loss` but the drawing."""
        device = device or tokens.device
        terms = self.terms(model, tokens, heights, moment, device)
        return self.total(terms, sent(moment.weight, device), (~is_pad(tokens, self.pad_id)).sum(1))

    def prepare(self, head: Any, tokens: Int[Tensor, "B S"], draws: Draws) -> Sheet:
        """Everything of `loss` that does not depend on the network, on draws.device: where tokens and noise are the processor's
        and the network a GPU's, it is made while the GPU is busy with steps before."""
        return self.sheet(head, tokens, *self.draw(tokens, draws), draws.device)

    def complete(self, model: Network, sheet: Sheet) -> Loss:
        return self.total(self.ask(model, sheet), sheet.moment.weight, sheet.tokens)

    def total(self, terms: Terms, weight: Float[Tensor, "B H"], tokens: Int[Tensor, "B"]) -> Loss:
        """Terms weighted and added up."""
        cell = terms.row * self.levels + terms.level
        bound = by_row(cell, terms.cost.double() * weight.flatten()[cell], weight.numel()).view(-1, self.levels)
        return Loss(terms.train, bound.sum(1), {"levels": bound, "tokens": tokens})

    def terms(self, model: Network, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"], moment: Moment,
              device: torch.device) -> Terms:
        """Tokens, heights and moment may be the processor's; the terms are on `device`."""
        return self.ask(model, self.sheet(model.head, tokens, heights, moment, device))

    def sheet(self, head: Any, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"], moment: Moment,
              device: torch.device) -> Sheet:
        nodes, active = self.active(tokens, heights, moment)
        place = active.flatten().nonzero()[:, 0]
        level, slot = self.questions(tokens, heights, place)
        order = ordered(head, nodes.flatten()[place], slot, device)
        if order is not None:
            place, level, slot = place[order.order], level[order.order], slot[order.order]
        row = place // tokens.shape[1]
        share = moment.train_weight[row, level] * sent(self.level_weights, level.device)[level] / tokens.numel()
        pad = is_pad(tokens, self.pad_id)
        return delivered(Sheet(moment, nodes, place, nodes.flatten()[place], row, level, slot, share,
                               pad.flatten()[place] if self.pad == "drop" else None, (~pad).sum(1), order), device)

    def questions(self, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"],
                  place: Int[Tensor, "M"]) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"]]:
        """Level and right answer of some positions."""
        level = heights.flatten()[place] - 1
        return level, self.tables(tokens).slot[level, tokens.flatten()[place]]

    def ask(self, model: Network, sheet: Sheet) -> Terms:
        hidden = model.hidden(sheet.nodes, sheet.moment.time, sheet.moment.level)
        rows = take(hidden.flatten(0, 1), sheet.place)
        train, nll = weighted_nll(model.head, rows, sheet.parent, sheet.slot, sheet.share, sheet.order)
        return Terms(sheet.row, sheet.level, nll if sheet.unseen is None else nll.masked_fill(sheet.unseen, 0), train)

    def tables(self, like: Tensor) -> Tree:
        """The tree where `like` lies."""
        return self.known if self.known is not None and not like.is_cuda else self.tree

    def active(self, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"],
               moment: Moment) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
        """What is seen, and which positions have something to predict.

        A position is active when its node has a choice of children *and* its level carries weight now: in the cascade
        a position that has not yet left the child state of a higher level is an inner node too, but has nothing to predict.
        """
        if self.pad == "given-length":
            heights = heights.masked_fill(is_pad(tokens, self.pad_id), 0)
        tree = self.tables(tokens)
        nodes = tree.ancestor[heights, tokens]
        carries = (moment.weight > 0).gather(1, (heights - 1).clamp(min=0)) & (heights > 0)
        return nodes, carries & (tree.num_children[nodes] > 1)

    def exact_count_loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        """The low-variance estimate of the same bound: one uniform *count* of masked units per level.

        Cascade only, and only for a network that is not told t; any alpha. For each level, with n units that are eligible
        to be active (a unit is a position here), k ~ U{1..n} of them stand in the parent state and the level's term is n
        times their mean cross-entropy. Units that are not eligible (one child) stand in the parent state when their own
        uniform lies below the k-th smallest of the eligible ones, which is exactly their law given k.
        """
        pad, bounds = is_pad(tokens, self.pad_id), []
        for level in range(self.levels):
            eligible = self.tree.num_children[self.tree.ancestor[level + 1][tokens]] > 1
            if self.pad == "given-length":
                eligible = eligible & ~pad
            eligible = in_units(eligible, self.unit).any(-1)
            n = eligible.sum(1)
            k = (1 + draws.strata(f"count {level}") * n).long().clamp(max=n.clamp(min=1))
            uniform = draws.uniform(f"order {level}", eligible.shape[1])
            ordered = uniform.masked_fill(~eligible, 2.0).sort(1).values
            threshold = ordered.gather(1, (k - 1)[:, None]).masked_fill((n == 0)[:, None], -1.0)
            heights = level + from_units((uniform <= threshold).long(), self.unit, tokens.shape[1])
            middle = torch.full((len(tokens),), (level + 0.5) / self.levels, dtype=torch.float64, device=tokens.device)
            carries = torch.zeros(len(tokens), self.levels, device=tokens.device)
            carries[:, level] = 1
            moment = Moment(middle, torch.full_like(k, level), carries, carries, carries)
            terms = self.terms(model, tokens, heights, moment, tokens.device)
            bounds.append(by_row(terms.row, terms.cost, len(tokens)) * n / k)
        levels = torch.stack(bounds, 1)
        return Loss(levels.sum() / tokens.numel(), levels.sum(1), {"levels": levels, "tokens": (~pad).sum(1)})

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        draw = SAMPLERS[choose_sampler(self.samplers, sampler)]
        return draw(model, self.process, self.tree, shape, steps=steps, draws=draws, prefix=prefix, reader=self.reader,
                    **options)
