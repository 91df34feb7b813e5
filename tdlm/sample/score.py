"""How score-entropy models step down: rules for the walk of `sample/flat.py`.

The network estimates s_y, the ratio of the probabilities of the sequence with y in the place of z_i and of the sequence as it is.
Reverse steps from t to s, for one position (nu: rates into z, (keep, noise)_ts: the forward kernel):

    euler      P(y)  =  [y = z]  +  (t - s) x reverse rates                    rates nu_t(z) s_y, minus their sum at z
    analytic   P(y)  =  q(z_t = z | z_s = y)  (kernel^-1 s)_y                  the ratios taken back from t to s

A step's row may be negative where the scores are not those of any distribution: such entries are set to 0 and the row is
normalised. The last step of either sampler is the analytic one down to t = 0, so N steps end without noise.

Absorbing graph: s_v = (1-t)/t e^{l_v} with l = raw - log V, and both steps become: leave MASK for v with probability (t-s)/t
e^{l_v}. They are the same; under log-linear noise the two names differ on the uniform graph only.

Temperature, top-p and min-p say *where* a position goes, never *whether*: they act on the normalised row without z.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ConfigError
from ..process.flat import Hybrid, Uniform
from .draw import Choice, invert
from .flat import Looking, Plan


def raw_scores(head: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The head's numbers before any normalisation: (hidden, parent) -> logits."""
    logits = getattr(head, "logits", None)
    if logits is None:
        raise ConfigError(f"sedd needs scores that are not normalised, and {type(head).__name__} has no logits(hidden, parent); "
                          "use method.head=shared or method.head=tied")
    return logits


@dataclass(frozen=True)
class AbsorbScore:
    process: Hybrid
    numbers = 1

    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        return torch.full_like(uniform, self.process.size, dtype=torch.int64)

    def plan(self, free: Bool[Tensor, "B S"]) -> Plan:
        return Looking(free, lambda state: state == self.process.size)

    def outcome(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], uniform: Float[Tensor, "M 1"],
                later: float, earlier: float, choice: Choice) -> Int[Tensor, "M"]:
        return invert(self.rows(head, hidden, state, later, earlier, choice), uniform[:, 0])

    def rows(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], later: float, earlier: float,
             choice: Choice) -> Float[Tensor, "M states"]:
        raw = raw_scores(head)(hidden, state).double()
        total = torch.exp(raw.logsumexp(1, keepdim=True) - math.log(self.process.size))
        go = (total * ((later - earlier) / later)).clamp(max=1) if earlier else torch.ones_like(total)
        return torch.cat([go * choice.probabilities(raw), 1 - go], 1)


@dataclass(frozen=True)
class UniformScore:
    process: Uniform
    euler: bool = False
    numbers = 1

    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        return (uniform * self.process.size).long().clamp(max=self.process.size - 1)

    def plan(self, free: Bool[Tensor, "B S"]) -> Plan:
        return Looking(free, lambda state: torch.ones_like(state, dtype=torch.bool))

    def outcome(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], uniform: Float[Tensor, "M 1"],
                later: float, earlier: float, choice: Choice) -> Int[Tensor, "M"]:
        return invert(self.rows(head, hidden, state, later, earlier, choice), uniform[:, 0])

    def rows(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], later: float, earlier: float,
             choice: Choice) -> Float[Tensor, "M V"]:
        here, t, s = state[:, None], torch.tensor(later, dtype=torch.float64), torch.tensor(earlier, dtype=torch.float64)
        raw = raw_scores(head)(hidden, torch.full_like(state, self.process.size)).double()
        score = raw.scatter(1, here, 0.0).exp()
        if self.euler and earlier:
            jumps = (score * float((t - s) * self.process.rates(t)[1])).scatter(1, here, 0.0)
            stay = 1 - jumps.sum(1, keepdim=True)
        else:
            keep, _, each = map(float, self.process.between(s, t))
            before = score / keep - (1 / keep - 1) / self.process.size * score.sum(1, keepdim=True)
            jumps, stay = (before * each).scatter(1, here, 0.0), before.gather(1, here) * (keep + each)
        jumps, stay = jumps.clamp(min=0), stay.clamp(min=0)
        leaving = jumps.sum(1, keepdim=True)
        where = torch.log(jumps).where(leaving > 0, 0.0)  # a row that goes nowhere needs no direction, only no NaN
        go = leaving / (leaving + stay)
        return (go * choice.probabilities(where)).scatter_add(1, here, 1 - go)
