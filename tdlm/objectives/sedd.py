"""SEDD: score entropy. The network does not predict a distribution but ratios, which need not belong to any distribution.

At state z the estimate s_y stands for q_t(z with y in place i) / q_t(z). With a_y = q(y) / q(z), the ratios for q = q_t(. | x),

    bound  =  prior + E_{t ~ U(0,1)} E_{z ~ q} sum over positions  nu_t(z) sum_{y != z} [ s_y - a_y log s_y + a_y (log a_y - 1) ],

every bracket >= 0, and zero for s = a: `score entropy`. The head's raw numbers become log s by the *output transform*, and the
current token's own log s is 0.

`absorb` (MASK): log s_v = raw_v - log V + log((1-m)/m), m the share of masks. Only masked positions are scored, and with
l = raw - log V the whole term is

    (1/t) [ sum_v e^{l_v} - 1 - l_x ]  =  (1/t) [ CE(softmax(raw), x)  +  Z - 1 - log Z ],    Z = sum_v e^{l_v}:

masked diffusion plus a penalty for not being normalised. Time is m itself. (The original stops at m = 1 - 1e-3 and has
not all masks at its end; in this form sigma = -log(1-m) may run to infinity, and there is no prior term.)

`uniform`: log s = raw. With rho = b / (alpha + b), the ratio of any other token to x,

    z = x:   sum_{y != x} [ s_y - rho log s_y + rho (log rho - 1) ],       z != x:  the same with 1 for rho, and 1/rho at y = x,

times (1-eps) / (V a): log-linear noise that ends at sigma = -log(eps). What is left of the token there is paid for by the prior
term, KL(q_1(. | x) || uniform) for every position.

Training is the same without the prior, on t in [1e-3, 1] as in the original (times below are drawn for the bound and train
nothing; the draw's density is divided out, so the expectation is the original's). The original sums over the
length and means over the batch; here it is the mean over B x S positions, 1/S of it. The network is told t, not sigma.

Not taken over: float32 draws, negative probabilities in a row, the mask probability of 0.999 taken for 1.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError, TreeError
from ..model.head import Shared, wider
from ..model.model import Network
from ..process.flat import Hybrid, Uniform
from ..registry import register
from ..rng import Draws
from ..sample import Sampled
from ..sample.flat import generate_flat
from ..sample.score import AbsorbScore, UniformScore, raw_scores
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, Places, beside, by_row, choose_sampler, in_pad_mode
from .jumps import Sheet, draw_noisy, roles, write
from .wide import in_parts

FLOOR = 1e-3
"""Training uses times in [FLOOR, 1]."""


@register("sedd")
@dataclass(frozen=True)
class SeddMethod:
    graph: Literal["absorb", "uniform"] = "absorb"
    eps: float = 1e-3
    """Where the noise of the uniform graph ends: sigma(1) = -log(eps). The absorbing graph runs to the end."""
    head: Any = field(default_factory=Shared)
    pad: Literal["count", "given-length"] = "count"
    role = "method"
    flat = True
    causal = False

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError(f"method.eps must lie in (0, 1), got {self.eps}; SEDD's value is 0.001")
        if self.graph == "absorb" and self.eps != SeddMethod.eps:
            raise ConfigError("method.eps has no effect on the absorbing graph, whose noise runs to the end; leave it out")

    def objective(self, tree: Tree, pad_id: int | None) -> SeddObjective:
        return SeddObjective(self, tree, pad_id)


class SeddObjective:
    causal = False
    prepares = True
    knows_level = False
    levels = 1
    samplers = ("analytic", "euler")

    def __init__(self, method: SeddMethod, tree: Tree, pad_id: int | None):
        if tree.height != 1:
            raise TreeError(f"sedd works on the star tree, got a tree of height {tree.height}; use Tree.star(tokens)")
        self.method, self.tree, self.pad_id = method, tree, pad_id
        self.absorbs = method.graph == "absorb"
        self.process = Hybrid(tree.size) if self.absorbs else Uniform(tree.size, method.eps)
        self.pad: Pad = method.pad
        self.num_states = tree.nodes

    def with_pad(self, pad: Pad) -> SeddObjective:
        return in_pad_mode(self, pad)

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def estimators(self, model: Network) -> dict[str, Estimator]:
        return {"sampled": self.loss}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        return self.complete(model, self.prepare(model.head, tokens, draws))

    def prepare(self, head: Any, tokens: Int[Tensor, "B S"], draws: Draws) -> Sheet:
        """Everything of `loss` that does not depend on the network, where the tokens are; for draws.device."""
        return self.sheet(tokens, *draw_noisy(self.process, tokens, beside(draws, tokens)), draws.device)

    def score(self, model: Network, tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"], time: Float[Tensor, "B"],
              density: Float[Tensor, "B"]) -> Loss:
        """The loss of given states: everything of `loss` but the drawing."""
        return self.complete(model, self.sheet(tokens, state, time, density, tokens.device))

    def sheet(self, tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"], time: Float[Tensor, "B"],
              density: Float[Tensor, "B"], device: torch.device) -> Sheet:
        parts = roles(tokens, state, self.pad_id, self.pad)
        _, moving, counted, state = parts
        places = Places(moving & (state == self.tree.size) if self.absorbs else moving,
                        every=not self.absorbs and self.pad != "given-length")
        weight = ((1 / time if self.absorbs else self.process.rates(time)[1]) / density)[:, None]
        share = weight * ((time >= FLOOR).double() / (1 - FLOOR) / tokens.numel())[:, None]
        return write(None, self.process, places, tokens, parts, time, weight * counted, share.expand(tokens.shape), device)

    def complete(self, model: Network, sheet: Sheet) -> Loss:
        terms = self._absorb if self.absorbs else self._uniform
        entropy = terms(model, sheet.hidden(model), sheet)
        bound = by_row(sheet.row, entropy.detach() * sheet.weight, len(sheet.state))
        if isinstance(self.process, Uniform):
            bound = bound + self.process.prior() * sheet.counted
        return Loss((entropy * sheet.share).sum(), bound, {"levels": bound[:, None], "tokens": sheet.tokens})

    def _absorb(self, model: Network, hidden: Tensor, sheet: Sheet) -> Float[Tensor, "M"]:
        """Z - 1 - l_x at masked positions."""
        logits, shift = raw_scores(model.head), math.log(self.tree.size)

        def sums(hidden: Tensor, state: Tensor, token: Tensor) -> Tensor:
            raw = wider(logits(hidden, state))
            own = raw.gather(1, token[:, None])[:, 0]
            return torch.stack([F.cross_entropy(raw, token, reduction="none") + own, own], 1)  # one pass; logsumexp takes five

        log_z, own = (in_parts(sums, self.tree.size, hidden, sheet.seen, sheet.token).double() - shift).unbind(1)
        return torch.expm1(log_z) - own

    def _uniform(self, model: Network, hidden: Tensor, sheet: Sheet) -> Float[Tensor, "M"]:
        """sum_{y != z} [...]; around s = 1 the terms e^r - 1 - r of all y are summed up, the rest is for x alone."""
        logits, mix, token, state = raw_scores(model.head), sheet.mix, sheet.token, sheet.seen
        rho = mix.each / (mix.keep + mix.each)

        def sums(hidden: Tensor, state: Tensor, token: Tensor) -> Tensor:
            raw = wider(logits(hidden, torch.full_like(state, self.tree.size))).scatter(1, state[:, None], 0.0)
            return torch.stack([(torch.expm1(raw) - raw).sum(1), raw.sum(1), raw.gather(1, token[:, None])[:, 0]], 1)

        around, total, own = in_parts(sums, self.tree.size, hidden, state, token).double().unbind(1)
        same = (1 - rho) * total + (self.tree.size - 1) * (1 + rho * (torch.log(rho) - 1))
        other = (1 - 1 / rho) * own + 1 - (torch.log(rho) + 1) / rho
        return around + torch.where(state == token, same, other)

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        name = choose_sampler(self.samplers, sampler)
        rule = (UniformScore(self.process, name == "euler") if isinstance(self.process, Uniform)
                else AbsorbScore(self.process))
        return generate_flat(model, rule, self.tree, shape, steps=steps, draws=draws, prefix=prefix, **options)
