"""GIDD: masked diffusion with some uniform noise, so that a token, once visible, can still be corrected.

Forward (`process/flat.py`, `Hybrid`): q_t(z | x) = alpha [z = x] + m [z = MASK] + b [z a token]. The network sees the noisy
sequence and predicts a distribution x_theta over tokens at *every* position. With q = q_t(. | x), p = q_t(. | x_theta) and
r = q(z) / p(z) at the visible state z,

    bound  =  E_{t ~ U(0,1)} E_{z ~ q}  sum over positions  w(z) [ KL(q || p) + r - log r - 1 ],      w(z) = nu_t(z) / q(z),

    w(MASK) = 1 / (t (1-t)),   w(another token) = h / (1-t),   w(x) = c h / (V (1-t) C (alpha + b)).

It is zero only for x_theta_i = p(x_i | the *other* noisy positions), and then the bound is -log p(x). With k = log(alpha / b)
and softplus(a) = log(1 + e^a), nothing under- or overflows and only V float32 numbers a position are ever needed:

    KL  =  (alpha + b) D  -  b sum_{v != x} softplus(k + log p_v),    D = softplus(k) - softplus(k + log p_x),
    log r  =  0 (MASK),   D (z = x),   -softplus(k + log p_z) (another token).

p_uniform = 0 is masked diffusion itself: b = 0, only masked positions count, w KL = CE / t. (The original puts e^-20 in the
place of 0 and leaves a state that is practically never visited with enormous weights.)

Training: `dynamic` (GIDD+) replaces w by 2 at MASK, 1 at another token, (B / (V+1)) exp(gamma/2 sigmoid(-t)) at x itself, at most
`clip`; `clip` is min(w, clip); `none` is w. The original draws t uniformly from [1e-4, 1 - 1e-4]: here t comes from the density
that suits the bound, and the training loss is weighted back, so that its expectation is the original's; times outside the
window train nothing. PAD is a token like any other in training (numerator and denominator, B x S), as in GIDD.

Not taken over: padding columns of the output that take softmax mass, e^-20 for 0, samplers that make N-1 of N steps.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError, TreeError
from ..model.head import Shared, SharedHead, TiedHead, weighted_nll
from ..model.kernels.linear_ce import survey_loss
from ..model.kernels.rows import Survey
from ..model.model import Network
from ..process.flat import Hybrid, Mix
from ..registry import register
from ..rng import Draws
from ..sample import Sampled
from ..sample.flat import Correction, Posterior, generate_flat
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, Places, beside, by_row, choose_sampler, in_pad_mode
from .jumps import Sheet, draw_noisy, roles, write
from .wide import in_parts, undivided

WINDOW = 1e-4
"""Training uses times in [WINDOW, 1 - WINDOW]."""


@register("gidd")
@dataclass(frozen=True)
class GiddMethod:
    p_uniform: float = 0.1
    """The probability of a uniform token at its most (t = 1/2); 0 is masked diffusion."""
    gamma: float = 1.0
    weighting: Literal["dynamic", "clip", "none"] = "dynamic"
    clip: float = 2.0
    """The largest train weight under `dynamic` and `clip`."""
    head: Any = field(default_factory=Shared)
    pad: Literal["count", "given-length"] = "count"
    role = "method"
    flat = True
    causal = False

    def __post_init__(self) -> None:
        if not 0 <= self.p_uniform < 1:
            raise ConfigError(f"method.p_uniform must lie in [0, 1), got {self.p_uniform}; GIDD's values are 0, 0.1 and 0.2")
        if not 0.25 <= self.gamma <= 2:
            raise ConfigError(f"method.gamma must lie in [0.25, 2], got {self.gamma}: above 2 the noise has negative rates")
        if not self.clip > 0:
            raise ConfigError(f"method.clip must be positive, got {self.clip}; for no clipping set method.weighting=none")
        if self.weighting == "none" and self.clip != GiddMethod.clip:
            raise ConfigError("method.clip has no effect while method.weighting is none; set one of them")

    def objective(self, tree: Tree, pad_id: int | None) -> GiddObjective:
        return GiddObjective(self, tree, pad_id)


class GiddObjective:
    causal = False
    prepares = True
    knows_level = False
    levels = 1
    samplers = ("ancestral", "self-correction")

    def __init__(self, method: GiddMethod, tree: Tree, pad_id: int | None):
        if tree.height != 1:
            raise TreeError(f"gidd works on the star tree, got a tree of height {tree.height}; use Tree.star(tokens)")
        self.method, self.tree, self.pad_id = method, tree, pad_id
        self.process = Hybrid(tree.size, method.p_uniform, method.gamma)
        self.mixed = method.p_uniform > 0
        self.pad: Pad = method.pad
        self.num_states = tree.nodes

    def with_pad(self, pad: Pad) -> GiddObjective:
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
        return self.sheet(head, tokens, *draw_noisy(self.process, tokens, beside(draws, tokens)), draws.device)

    def score(self, model: Network, tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"], time: Float[Tensor, "B"],
              density: Float[Tensor, "B"]) -> Loss:
        """The loss of given states: everything of `loss` but the drawing."""
        return self.complete(model, self.sheet(model.head, tokens, state, time, density, tokens.device))

    def sheet(self, head: Any, tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"], time: Float[Tensor, "B"],
              density: Float[Tensor, "B"], device: torch.device) -> Sheet:
        parts = roles(tokens, state, self.pad_id, self.pad)
        _, moving, counted, state = parts
        weight, train_weight = (each / density[:, None] for each in self.weights(tokens, state, time))
        places = Places(moving if self.mixed else moving & (state == self.tree.size),
                        every=self.mixed and self.pad != "given-length")
        inside = ((time >= WINDOW) & (time <= 1 - WINDOW)).double() / (1 - 2 * WINDOW)
        share = train_weight * inside[:, None] / tokens.numel()
        return write(None if self.mixed else head, self.process, places, tokens, parts, time, weight * counted, share, device)

    def complete(self, model: Network, sheet: Sheet) -> Loss:
        hidden = sheet.hidden(model)
        if self.mixed:
            train, divergence = self.weighted_divergence(model.head, hidden, sheet)
        else:  # KL = alpha CE, r = 1
            keep = sheet.mix.keep
            train, nll = weighted_nll(model.head, hidden, sheet.seen, sheet.token, sheet.share * keep, sheet.order)
            divergence = keep * nll.double()
        bound = by_row(sheet.row, divergence.detach() * sheet.weight, len(sheet.state))
        return Loss(train, bound, {"levels": bound[:, None], "tokens": sheet.tokens})

    def weights(self, tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"],
                time: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
        """w, and what training puts in its place (anything where p_uniform = 0 and the state is not MASK)."""
        t, method, masked, own = time[:, None], self.method, state == self.tree.size, state == tokens
        mix, (to_mask, to_each) = self.process.at(t), self.process.rates(t)

        def by_state(mask: Tensor, same: Tensor, other: Tensor) -> Tensor:
            return torch.where(masked, mask, torch.where(own, same, other))

        weight = by_state(to_mask / mix.mask, to_each / (mix.keep + mix.each), to_each / mix.each)
        if method.weighting == "none":
            return weight, weight
        if method.weighting == "clip":
            return weight, weight.clamp(max=method.clip)
        same = self.process.scale / (self.tree.size + 1) * torch.exp(method.gamma / 2 * torch.sigmoid(-t))
        return weight, by_state(torch.full_like(t, 2.0), same, torch.ones_like(t)).clamp(max=method.clip)

    def weighted_divergence(self, head: Any, hidden: Float[Tensor, "M d"],
                            sheet: Sheet) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """(sum of share x divergence, divergence) where p_uniform > 0. A wide head makes its gradients with its logits, unless a
        processor can keep them all: without a kernel of its own that is faster."""
        keeps = not hidden.is_cuda and undivided(len(hidden), self.tree.size)
        matrix = head.kept_by_nobody() if isinstance(head, SharedHead | TiedHead) and not keeps else None
        if matrix is None:
            divergence = torch.stack(self.divergences(head, hidden, sheet.token, sheet.seen, sheet.mix)).sum(0)
            return (divergence * sheet.share).sum(), divergence
        weight, bias, classes = matrix
        pair = torch.stack([sheet.token, sheet.seen.clamp(max=self.tree.size - 1)], 1)

        def loss(found: Survey, part: slice) -> Tensor:
            mix = Mix(*(number[part] for number in sheet.mix))
            return torch.stack(self.compare(found, sheet.token[part], sheet.seen[part], mix)).sum(0)

        k = torch.log(sheet.mix.keep / sheet.mix.each)
        return survey_loss(hidden, weight, bias, head.column(pair), k, sheet.share, loss, classes)

    def divergences(self, head: Any, hidden: Float[Tensor, "M d"], token: Int[Tensor, "M"], state: Int[Tensor, "M"],
                    mix: Mix) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
        """KL(q || p) and r - log r - 1 where p_uniform > 0, float64; the sum over the vocabulary in the precision of the head."""
        root, k = torch.full_like(token, self.tree.size), torch.log(mix.keep / mix.each)

        def sums(hidden: Tensor, root: Tensor, token: Tensor, state: Tensor, k: Tensor) -> Tensor:
            log_p = head.log_probs(hidden, root)
            pair = torch.stack([token, state.clamp(max=self.tree.size - 1)], 1)
            return torch.cat([log_p.gather(1, pair), softplus(log_p + k[:, None].to(log_p.dtype)).sum(1, keepdim=True)], 1)

        found = in_parts(sums, self.tree.size, hidden, root, token, state, k).double()
        return self.compare(Survey(*found.unbind(1)), token, state, mix)

    def compare(self, found: Survey, token: Int[Tensor, "M"], state: Int[Tensor, "M"],
                mix: Mix) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
        """The same from log p_x, log p_z and the sum of softplus(k + log p_v)."""
        k = torch.log(mix.keep / mix.each)
        reach = softplus(k + found.first)
        away = softplus(k) - reach
        kl = (mix.keep + mix.each) * away - mix.each * (found.spread - reach)
        log_r = torch.where(state == token, away, -softplus(k + found.second)).masked_fill(state == self.tree.size, 0.0)
        return kl, torch.expm1(log_r) - log_r

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        if choose_sampler(self.samplers, sampler) == "self-correction":
            options = {"correction": Correction(), **options}
        return generate_flat(model, Posterior(self.process), self.tree, shape, steps=steps, draws=draws, prefix=prefix, **options)


def softplus(a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 + e^a); torch's own threshold of 20 is too coarse for float64."""
    return F.softplus(a, threshold=40.0)
