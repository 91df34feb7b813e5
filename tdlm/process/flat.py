"""Flat jump processes: tokens 0..V-1 and MASK (id V), every position on its own, no tree in between.

All of them interpolate between the token and a mixture: at time t

    q_t(z | x)  =  alpha [z = x]  +  m [z = MASK]  +  b [z is a token],          alpha + m + V b = 1,

so three numbers say everything (`Mix`), and the kernel from s to t > s has the same form: alpha_ts = alpha_t / alpha_s and
(m, b)_ts = (m, b)_t - alpha_ts (m, b)_s, written below without cancellation. The chain jumps *to* z at the rate

    nu_t(z)  =  (m, b)'(z) - (alpha' / alpha) (m, b)(z)          from wherever it stands.

| process | alpha | m | b | nu(MASK) | nu(token) |
|---|---|---|---|---|---|
| `Hybrid` | (1-t) / C | t / C | c / (V C) | 1 / ((1-t) C) | c h / (V (1-t) C) |
| `Uniform` | a | 0 | (1-a) / V | 0 | (1-eps) / (V a) |

Hybrid (GIDD): c = B (t (1-t))^(gamma/2), C = 1 + c, B = 2^gamma p / (1-p), h = (gamma + 2 t (1-gamma)) / (2t); the
probability of a uniform token peaks at p = `p_uniform` (t = 1/2). p = 0 is masked diffusion, exactly. h >= 0 needs gamma
<= 2. Uniform (SEDD): a = e^-sigma = 1 - (1-eps) t, log-linear noise, which ends at sigma = -log(eps).

Times. The bound is an integral over all t in (0, 1), and its integrand is rare but large near 0: a position in a *wrong*
token state has probability ~ t^(gamma/2) and weight ~ 1/t, so the second moment ~ t^(gamma/2 - 2) is not even integrable
(without wrong tokens: probability ~ t, weight ~ 1/t, second moment ~ 1/t). The density of t that makes the variance least is
its square root, t^(gamma/4 - 1) (or t^(-1/2)); it is drawn as u^(4/gamma) (or u^2). A quarter of the draws come from it, so
that the weight 1/density of all others stays below 4/3. `Uniform` has large rates at the other end, up to 1/eps; a second
quarter is drawn evenly in sigma.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

SHARE = 0.25
"""The part of the time draws that each special density gets."""


class Mix(NamedTuple):
    """alpha, m and b: of a marginal or of a kernel."""

    keep: Float[Tensor, "*batch"]
    mask: Float[Tensor, "*batch"]
    each: Float[Tensor, "*batch"]


@runtime_checkable
class FlatProcess(Protocol):
    @property
    def size(self) -> int:
        """V; the id of MASK."""
        ...

    def at(self, t: Float[Tensor, "*batch"]) -> Mix:
        """q_t(z | x)."""
        ...

    def between(self, s: Float[Tensor, "*batch"], t: Float[Tensor, "*batch"]) -> Mix:
        """q(z_t | z_s), s <= t."""
        ...

    def rates(self, t: Float[Tensor, "*batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """nu_t of MASK and of each token."""
        ...

    def times(self, u: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Uniforms to times and the density they are drawn from (stratified uniforms give stratified times)."""
        ...


@dataclass(frozen=True)
class Hybrid:
    """Masks with some uniform noise among them (GIDD); p_uniform = 0 is masked diffusion with alpha = 1 - t."""

    size: int
    p_uniform: float = 0.0
    gamma: float = 1.0

    @property
    def scale(self) -> float:
        """B."""
        return 2**self.gamma * self.p_uniform / (1 - self.p_uniform)

    def noise(self, t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """c_t."""
        return self.scale * (t * (1 - t)) ** (self.gamma / 2)

    def at(self, t: Float[Tensor, "*batch"]) -> Mix:
        c = self.noise(t)
        return Mix((1 - t) / (1 + c), t / (1 + c), c / (self.size * (1 + c)))

    def between(self, s: Float[Tensor, "*batch"], t: Float[Tensor, "*batch"]) -> Mix:
        """c_ts = c_t - c_s (1-t) / (1-s) = c_t (1 - e^-d), with d = log of c / (1-t) at t over the same at s."""
        c, c_s, left = self.noise(t), self.noise(s), (1 - t) / (1 - s)
        d = torch.log1p((t - s) / s) * (self.gamma / 2) + torch.log(left) * (self.gamma / 2 - 1)
        fresh = c * -torch.expm1(-d.masked_fill((t == 1) | (s == 0), torch.inf))
        return Mix(left * (1 + c_s) / (1 + c), (t - s) / ((1 - s) * (1 + c)), fresh / (self.size * (1 + c)))

    def rates(self, t: Float[Tensor, "*batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        c = self.noise(t)
        to_mask = 1 / ((1 - t) * (1 + c))
        return to_mask, to_mask * c * (self.gamma + 2 * t * (1 - self.gamma)) / (2 * t * self.size)

    def times(self, u: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        power = 4 / self.gamma if self.p_uniform else 2.0
        t = torch.where(u <= SHARE, (u / SHARE) ** power, (u - SHARE) / (1 - SHARE)).clamp(max=1 - 2.0**-53)
        return t, SHARE * early(t, power) + 1 - SHARE


@dataclass(frozen=True)
class Uniform:
    """A token becomes any other with equal rates (SEDD's uniform graph); MASK is never seen."""

    size: int
    eps: float = 1e-3

    def kept(self, t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """a_t = e^-sigma."""
        return 1 - (1 - self.eps) * t

    def at(self, t: Float[Tensor, "*batch"]) -> Mix:
        return Mix(self.kept(t), torch.zeros_like(t), (1 - self.eps) * t / self.size)

    def between(self, s: Float[Tensor, "*batch"], t: Float[Tensor, "*batch"]) -> Mix:
        moved = (1 - self.eps) * (t - s) / self.kept(s)
        return Mix(self.kept(t) / self.kept(s), torch.zeros_like(moved), moved / self.size)

    def rates(self, t: Float[Tensor, "*batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        return torch.zeros_like(t), (1 - self.eps) / (self.size * self.kept(t))

    def times(self, u: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        rest, end = 1 - 2 * SHARE, -math.log(self.eps)
        late = -torch.expm1(-end * (u - SHARE) / SHARE) / (1 - self.eps)
        t = torch.where(u <= SHARE, (u / SHARE) ** 2, torch.where(u <= 2 * SHARE, late, (u - 2 * SHARE) / rest))
        t = t.clamp(max=1 - 2.0**-53)
        return t, SHARE * early(t, 2.0) + SHARE * (1 - self.eps) / (end * self.kept(t)) + rest

    def prior(self) -> float:
        """KL(q_1(. | x) || uniform) of one position: what the bound owes for ending at sigma = -log(eps)."""
        other = 1 - self.eps
        own = self.eps * self.size + other
        return own / self.size * math.log(own) + other * (self.size - 1) / self.size * math.log(other)


def early(t: Float[Tensor, "*batch"], power: float) -> Float[Tensor, "*batch"]:
    """The density of u ** power."""
    return t ** (1 / power - 1) / power


def corrupt(process: FlatProcess, t: Float[Tensor, "B"], tokens: Int[Tensor, "B S"], kind: Float[Tensor, "B S"],
            token: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """The noisy state: `kind` decides between a uniform token, MASK and keeping, `token` which token (uniforms in (0, 1)).

    Uniform tokens take the bottom of the interval, where floating point resolves small probabilities.
    """
    mix = process.at(t)
    noise, mask = (mix.each * process.size)[:, None], mix.mask[:, None]
    masked = torch.where(kind < noise + mask, process.size, tokens)
    return torch.where(kind < noise, (token * process.size).long().clamp(max=process.size - 1), masked)


def marginal(mix: Mix, p: Float[Tensor, "M V"]) -> Float[Tensor, "M V+1"]:
    """q_t(. | p): a predicted distribution over tokens, as noisy as the data are."""
    return torch.cat([mix.keep[:, None] * p + mix.each[:, None], mix.mask[:, None].expand(len(p), 1)], 1)


def posterior(process: FlatProcess, state: Int[Tensor, "M"], p: Float[Tensor, "M V"], s: Float[Tensor, "M"],
              t: Float[Tensor, "M"]) -> Float[Tensor, "M V+1"]:
    """q(z_s | z_t = state, x ~ p), exact Bayes: q(state | z_s) q_s(z_s | p), normalised."""
    kernel, before = process.between(s, t), marginal(process.at(s), p)
    to_state = torch.where(state == process.size, kernel.mask, kernel.each)
    row = to_state[:, None] * before
    row.scatter_add_(1, state[:, None], (kernel.keep[:, None] * before.gather(1, state[:, None])))
    return row / row.sum(1, keepdim=True)
