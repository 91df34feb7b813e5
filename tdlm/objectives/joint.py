"""Joint prediction of a neighbourhood (the paper's appendix): L adjacent positions share one distribution over the
combinations of their children (`model/joint.py`), so that neighbours need not be independent given what is seen.

Under independent corruption the joint cross-entropy with the weight of a single position is *not* a bound: L equal tokens
would cost 1/L of their entropy (the others are seen before the last one is asked for). Two honest modes:

unit      A neighbourhood is corrupted and revealed as one. It then is a single token of a larger alphabet, on the product
          tree, and the bound has the form of the tree method's,

              -log p(x)  <=  sum over neighbourhoods  lambda_l w_l / w_{l+1}  E[ -log p(slots of its active positions | z_t) ],

          tight for the exact posterior. All of it is divided by the number of real tokens; a last shorter neighbourhood is
          one too, and PAD inside a neighbourhood is counted with it.

marginal  Positions are corrupted independently. The published bound is that of the single-position marginals of the joint
          distribution, an ordinary bound of the tree method. Training takes the joint cross-entropy of the A active
          positions of a neighbourhood, given those that have moved,

              train  =  sum over neighbourhoods  (mean weight of its active positions)  x  -log p(slots of A | z_t):

          for every z_t it is least at the true joint posterior, whose marginals are the true marginals, so it leads to the
          least bound as well; for neighbours that are independent given z_t it is the tree method's loss (in the cascade,
          where all weights are equal). The joint distribution serves the sampler: positions of a neighbourhood that fall in
          the same step are drawn together, from the joint distribution with the others summed out.

With L = 1 both are the tree method with the shared head. PAD modes are those of `tree.py`; in `given-length` mode PAD is
never corrupted, also inside a unit, and `drop` sums PAD out of the unit's distribution.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError
from ..model.joint import JointHead, Neighbourhood, combinations, marginals, own_slots, sum_out
from ..model.model import Network
from ..process import Cascade, Moment
from ..registry import register
from ..rng import sent
from ..sample import Choice
from ..sample.draw import invert
from ..sample.walk import View, certainty, in_units
from ..tree.tree import Tree
from .base import is_pad
from .tree import Terms, TreeMethod, TreeObjective


@register("joint")
@dataclass(frozen=True)
class JointMethod:
    """The tree method's choices, and the neighbourhood: its length L, how hidden states meet, which mode."""

    process: Any = field(default_factory=Cascade)
    neighbourhood: int = 2
    combine: Literal["concat", "mean"] = "concat"
    mode: Literal["unit", "marginal"] = "unit"
    pad: Literal["count", "given-length"] = "count"
    clip: float | None = 2.0
    level_weights: Literal["none", "linear", "exponential"] = "none"
    level_gamma: float = 0.0
    role = "method"
    flat = False
    causal = False

    def __post_init__(self) -> None:
        if self.neighbourhood < 1:
            raise ConfigError(f"method.neighbourhood must be at least 1, got {self.neighbourhood}")
        self.as_tree()

    def as_tree(self) -> TreeMethod:
        return TreeMethod(process=self.process, pad=self.pad, clip=self.clip, level_weights=self.level_weights,
                          level_gamma=self.level_gamma)

    @property
    def head(self) -> Neighbourhood:
        return Neighbourhood(self.neighbourhood, self.combine)

    def objective(self, tree: Tree, pad_id: int | None) -> JointObjective:
        return JointObjective(self, tree, pad_id)


class Neighbours:
    """Draws the positions of a neighbourhood together."""

    def __init__(self, tree: Tree, length: int, unit: int):
        self.neighbourhood, self.unit, self.own = length, unit, own_slots(tree)

    def ask(self, head: JointHead, hidden: Tensor, view: View) -> tuple[Tensor, Tensor, Float[Tensor, "M classes"]]:
        """Row and neighbourhood of all that have something to draw, and their joint distributions."""
        row, column = in_units(view.draw, self.neighbourhood).any(-1).nonzero(as_tuple=True)
        known = torch.where(view.forced >= 0, view.forced, self.own[view.nodes]).masked_fill(view.draw | view.open, -1)
        state, node, known = (in_units(values, self.neighbourhood)[row, column] for values in (hidden, view.nodes + 1, known))
        return row, column, head.log_probs(state, node - 1, known)

    def outlook(self, head: Any, hidden: Float[Tensor, "R S d"], view: View,
                choice: Choice) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M 2"]]:
        view = view.on(hidden.device)
        row, column, log_probs = self.ask(head, hidden, view)
        if self.unit == self.neighbourhood:
            return row, column, certainty(log_probs, choice)
        each = marginals(log_probs, head.base, self.neighbourhood)
        which, place = in_units(view.draw, self.neighbourhood)[row, column].nonzero(as_tuple=True)
        return row[which], column[which] * self.neighbourhood + place, certainty(each[which, place], choice)

    def draw(self, head: Any, hidden: Float[Tensor, "R S d"], view: View, uniform: Float[Tensor, "R U"],
             choice: Choice) -> Int[Tensor, "M"]:
        view, uniform = view.on(hidden.device), uniform.to(hidden.device)
        row, column, log_probs = self.ask(head, hidden, view)
        if self.unit < self.neighbourhood and bool(view.open.any()):
            log_probs = sum_out(log_probs, in_units(view.open, self.neighbourhood)[row, column], head.base)
        drawn = in_units(view.draw, self.neighbourhood)
        first = drawn[row, column].long().argmax(1)  # of a neighbourhood's own numbers that of its first position is used
        mine = uniform[row, column] if self.unit > 1 else in_units(uniform, self.neighbourhood)[row, column, first]
        slots = torch.zeros_like(drawn, dtype=torch.int64)
        slots[row, column] = head.slots(invert(choice.probabilities(log_probs), mine))
        return slots.flatten(1)[:, : view.nodes.shape[1]][view.draw]


class JointObjective(TreeObjective):
    prepares = False

    def __init__(self, method: JointMethod, tree: Tree, pad_id: int | None):
        super().__init__(method.as_tree(), tree, pad_id)
        combinations(tree.branching, method.neighbourhood)
        self.length = method.neighbourhood
        self.unit = self.length if method.mode == "unit" else 1
        self.reader = neighbours = Neighbours(tree, self.length, self.unit)
        self.own = neighbours.own

    def terms(self, model: Network, tokens: Int[Tensor, "B S"], heights: Int[Tensor, "B S"], moment: Moment,
              device: torch.device) -> Terms:
        head = cast(JointHead, model.head)
        tokens, heights, moment = sent(tokens, device), sent(heights, device), moment.to(device)
        nodes, active = self.active(tokens, heights, moment)
        hidden = model.hidden(nodes, moment.time, moment.level)
        row, column = in_units(active, self.length).any(-1).nonzero(as_tuple=True)

        def here(values: Tensor) -> Tensor:
            return in_units(values, self.length)[row, column]

        at_level = (heights - 1).clamp(min=0)
        known = self.own[nodes].masked_fill(active, -1)
        lit, level = here(active), here(at_level)
        slots = here(torch.where(active, self.tree.slot[at_level, tokens], known))
        logits = head.masked(here(hidden), here(nodes + 1) - 1, here(known))
        nll = F.cross_entropy(logits, head.code(slots), reduction="none")
        weights = (moment.train_weight[row[:, None], level] * sent(self.level_weights, device)[level]).masked_fill(~lit, 0)
        share = weights.sum(1) / lit.sum(1) / tokens.numel()
        train = (nll * share.to(nll.dtype)).sum()
        counted = lit & ~here(is_pad(tokens, self.pad_id)) if self.pad == "drop" else lit
        with torch.no_grad():
            if self.unit < self.length:
                which, place = counted.nonzero(as_tuple=True)
                each = marginals(logits.log_softmax(-1), head.base, self.length)
                return Terms(row[which], level[which, place], -each[which, place, slots[which, place]], train)
            cost = without(head, logits, slots, lit & ~counted) if self.pad == "drop" else nll
            return Terms(row, level.masked_fill(~lit, 0).amax(1), cost.masked_fill(~counted.any(1), 0), train)


def without(head: JointHead, logits: Float[Tensor, "M classes"], slots: Int[Tensor, "M L"],
            gone: Tensor) -> Float[Tensor, "M"]:
    """The cross-entropy of a combination when the positions of `gone` (M, L) are summed out."""
    rest = sum_out(logits.log_softmax(-1), gone, head.base)
    return -rest.gather(1, head.code(slots.masked_fill(gone, 0))[:, None])[:, 0]
