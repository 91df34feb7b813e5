"""The judge of the flat jump processes: enumeration on small worlds, in float64, with none of their closed forms.

Only the marginals are taken from the definitions: K_t, the matrix whose row x is q_t(. | x) over the states (V tokens and
MASK). The rest is matrix algebra and differentiation: the kernel from s to t is K_s^-1 K_t, the generator K_t^-1 K_t'.

The general bound of a jump process. The chain of one position jumps from y to z at the rate Q_t[y, z]. Seen backwards it
jumps from z to y at Q_t[y, z] q(y) / q(z), where q = q_t(. | x) for one who knows x; a model puts its own ratio b_y in the place
of a_y = q(y) / q(z). What that costs is

    -log p(x) <= KL(q_1(. | x) || start) + Int_0^1 dt E_{z ~ q_t(. | x)} sum_i sum_{y != z_i} Q_t[y, z_i] (a log(a/b) - a + b),

with equality when b is the ratio of the true marginals of the *sequences*, q_t(z with y at i) / q_t(z). A denoiser x_theta
stands for the ratios of K_t x_theta at position i. For those to be true, x_theta has to be the posterior of x_i given the
*other* positions, p(x_i | z_-i): the noise of position i itself is in K_t already.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .flat import FlatProcess, Hybrid, Uniform

FLOAT = torch.float64
Ratios = Callable[[tuple[int, ...], float], Tensor]
"""(state, time) -> estimated ratios (S, V+1)."""
Rows = Callable[[tuple[int, ...], float, float], Tensor]
"""(state, later, earlier) -> what each position is drawn from (S, V+1)."""


def marginals(process: FlatProcess, t: Tensor) -> Tensor:
    """K_t (V+1, V+1), from the definitions; MASK has a row too, as a state to start from."""
    size = process.size
    tokens, mask = torch.ones(size + 1, dtype=FLOAT), torch.zeros(size + 1, dtype=FLOAT)
    tokens[size], mask[size] = 0, 1
    if isinstance(process, Uniform):
        sigma = -torch.log(1 - (1 - process.eps) * t)
        alpha, noise = torch.exp(-sigma), (1 - torch.exp(-sigma)) * tokens / size
    else:
        assert isinstance(process, Hybrid), "the oracle knows the processes of this package"
        scale = 2**process.gamma * process.p_uniform / (1 - process.p_uniform)
        c = scale * t ** (process.gamma / 2) * (1 - t) ** (process.gamma / 2)
        alpha, noise = (1 - t) / (1 + c), (t * mask + c * tokens / size) / (1 + c)
    return alpha * torch.eye(size + 1, dtype=FLOAT) + noise


def kernel(process: FlatProcess, s: float, t: float) -> Tensor:
    """q(z_t | z_s): rows from, columns to."""
    first, second = (marginals(process, torch.tensor(time, dtype=FLOAT)) for time in (s, t))
    return torch.linalg.solve(first, second)


def generator(process: FlatProcess, t: float) -> Tensor:
    """Q_t."""
    time = torch.tensor(t, dtype=FLOAT)
    slope = torch.autograd.functional.jacobian(lambda at: marginals(process, at), time)
    return torch.linalg.solve(marginals(process, time), torch.as_tensor(slope))


def panels(step: float = 1 / 16) -> list[tuple[float, float]]:
    """Nodes and weights over t in (0, 1) that forgive singular ends (the double exponential rule)."""
    count = int(4.25 / step)
    nodes = []
    for k in range(-count, count + 1):
        y = math.pi * math.sinh(k * step)
        t, rest = 1 / (1 + math.exp(-y)), 1 / (1 + math.exp(y))
        if rest > 1e-14:
            nodes.append((t, step * math.pi * math.cosh(k * step) * t * rest))
    return nodes


def jump_costs(rates: Tensor, true: Tensor, model: Tensor) -> Tensor:
    """sum_y Q[y, z] (a log(a/b) - a + b) over the last axis; the entry y = z has to hold equal ratios (1 and 1)."""
    terms = torch.where(true > 0, torch.xlogy(true, true / model), 0.0) - true + model
    return torch.where(rates > 0, rates * terms, 0.0).sum(-1)


class FlatWorld:
    """All sequences of S tokens with a joint distribution, and all their noisy states."""

    def __init__(self, process: FlatProcess, joint: Tensor):
        self.process, self.size, self.length = process, process.size, joint.dim()
        self.joint = joint.to(FLOAT) / joint.sum()
        self.sequences = list(itertools.product(range(self.size), repeat=self.length))
        self.states = list(itertools.product(range(self.size + 1), repeat=self.length))

    def at(self, t: float) -> Tensor:
        return marginals(self.process, torch.tensor(t, dtype=FLOAT))

    def noisy(self, t: float) -> Tensor:
        """The marginal of the states of sequences: one axis of V+1 per position."""
        result, K = self.joint, self.at(t)[: self.size]
        for _ in range(self.length):
            result = result.movedim(0, -1) @ K
        return result

    def exact_ratios(self, state: tuple[int, ...], t: float) -> Tensor:
        """q_t(state with y at i) / q_t(state)   (S, V+1)."""
        q = self.noisy(t)
        return torch.stack([q[tuple(slice(None) if j == i else z for j, z in enumerate(state))] / q[state]
                            for i in range(self.length)])

    def leave_one_out(self, state: tuple[int, ...], t: float) -> Tensor:
        """The exact denoiser p(x_i | z_-i)   (S, V)."""
        K, result = self.at(t)[: self.size], []
        for i in range(self.length):
            joint = self.joint
            for j, z in enumerate(state):
                if j != i:
                    joint = joint * K[:, z].view([-1 if axis == j else 1 for axis in range(self.length)])
            weight = joint.sum([j for j in range(self.length) if j != i]) if self.length > 1 else joint
            result.append(weight / weight.sum())
        return torch.stack(result)

    def ratios_of(self, denoiser: Callable[[tuple[int, ...], float], Tensor]) -> Ratios:
        """The ratios that a denoiser stands for."""
        def ratios(state: tuple[int, ...], t: float) -> Tensor:
            noisy = denoiser(state, t) @ self.at(t)[: self.size]
            return noisy / noisy.gather(1, torch.tensor(state)[:, None])
        return ratios

    def bound(self, x: tuple[int, ...], ratios: Ratios, step: float = 1 / 16) -> float:
        """The integral of the general bound (without the term of the start)."""
        total = 0.0
        for t, dt in panels(step):
            K, Q = self.at(t), generator(self.process, t)
            for state in self.states:
                chance = math.prod(float(K[token, z]) for token, z in zip(x, state))
                if chance:
                    model = ratios(state, t)
                    for i, (token, z) in enumerate(zip(x, state)):
                        rates = Q[:, z].clone()
                        rates[z] = 0
                        total += dt * chance * float(jump_costs(rates, K[token] / K[token, z], model[i]))
        return total

    def law(self, times: list[float], start: dict[tuple[int, ...], float], rows: Rows) -> dict[tuple[int, ...], float]:
        """The distribution over states after a walk down a time grid: every position is drawn from its row, set to 0 where it
        is negative and normalised."""
        states = start
        for later, earlier in zip(times, times[1:]):
            moved: dict[tuple[int, ...], float] = {}
            for state, mass in states.items():
                p = rows(state, later, earlier).clamp(min=0)
                p = p / p.sum(1, keepdim=True)
                for target in self.states:
                    share = mass * math.prod(float(p[i, z]) for i, z in enumerate(target))
                    if share:
                        moved[target] = moved.get(target, 0.0) + share
            states = moved
        return states

    def bayes_rows(self, denoiser: Callable[[tuple[int, ...], float], Tensor]) -> Rows:
        """q(z_s | z_t, x ~ denoiser) by Bayes' rule."""
        def rows(state: tuple[int, ...], later: float, earlier: float) -> Tensor:
            before = denoiser(state, later) @ self.at(earlier)[: self.size]
            joint = before * kernel(self.process, earlier, later)[:, list(state)].T
            return joint / joint.sum(1, keepdim=True)
        return rows

    def euler_rows(self, ratios: Ratios) -> Rows:
        """One Euler step of the reverse chain: 1 at the state, plus (t - s) times its rates."""
        def rows(state: tuple[int, ...], later: float, earlier: float) -> Tensor:
            rates = generator(self.process, later)[:, list(state)].T * ratios(state, later)
            here = torch.nn.functional.one_hot(torch.tensor(state), self.size + 1).bool()
            jumps = (later - earlier) * rates.masked_fill(here, 0.0)
            return jumps + here * (1 - jumps.sum(1, keepdim=True))
        return rows

    def analytic_rows(self, ratios: Ratios) -> Rows:
        """The ratios taken back to s by the inverse kernel, times the kernel."""
        def rows(state: tuple[int, ...], later: float, earlier: float) -> Tensor:
            forward = kernel(self.process, earlier, later)
            return torch.linalg.solve(forward.T, ratios(state, later).T).T * forward[:, list(state)].T
        return rows


def scores(process: FlatProcess, raw: Tensor, state: tuple[int, ...], t: float) -> Tensor:
    """SEDD's output transform, as it is written: raw numbers (S, V+1) to ratios; scaled by sigma on the absorbing graph."""
    if isinstance(process, Uniform):
        return raw.scatter(1, torch.tensor(state)[:, None], 0.0).exp()
    sigma = -math.log1p(-float(marginals(process, torch.tensor(t, dtype=FLOAT))[0, process.size]))
    log_score = raw - math.log(math.expm1(sigma)) - math.log(process.size)
    return log_score.scatter(1, torch.tensor(state)[:, None], 0.0).exp()
