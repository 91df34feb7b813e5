"""The judge: the method on small worlds by enumeration, in float64, with none of the closed forms of the fast code.

A *place* is a pair (height, node): padded paths repeat a token's id, so the id alone is no state. The chain of one
position is given by its rates lambda_l(t) only; everything else here is derived by matrix algebra from them:

    generator Q_t, cumulative P_{t|s} (within and across levels), marginals, the reverse kernel, the backward rates and
    the general continuous-time bound of the paper's Lemma (Proposition H.4 of its reference), which the closed form
    -alpha' / (1 - alpha) * cross-entropy must equal.

For sequences, `Enumeration` lists every x in V^S and every pattern of heights in {0..H}^S, gives the exact posterior's
cross-entropies, integrates bounds by quadrature and follows a sampler's law step by step. Exponential on purpose.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree.tree import Tree
from .base import Process
from .cascade import Cascade
from .overlapping import Overlapping
from .schedule import Cosine, Linear, Polynomial, Schedule

FLOAT = torch.float64
Predictor = Callable[[tuple[int, ...], float], Tensor]
"""(node ids of a sequence, time) -> child probabilities (S, K), rows of inactive positions ignored."""


def alpha(schedule: Schedule, u: float) -> float:
    """alpha(u), written again from its definition."""
    match schedule:
        case Linear():
            return 1 - u
        case Cosine():
            return 1 - math.cos(math.pi / 2 * (1 - u))
        case Polynomial(power=power):
            return 1 - u**power
    raise TypeError(f"the oracle does not know the schedule {schedule}")


def integrated_rates(process: Process, height: int, s: float, t: float) -> list[float]:
    """Int_s^t lambda_l for every level: -log of the probability to stay at height l (infinite across a threshold)."""
    if isinstance(process, Overlapping):
        return [math.log1p(-s) - math.log1p(-t) if t < 1 else math.inf] * height
    assert isinstance(process, Cascade), "the oracle knows the processes of this package"
    edges, total = process.edges(height), []
    for low, high in zip(edges, edges[1:]):
        u, v = (min(max((x - low) / (high - low), 0.0), 1.0) for x in (s, t))
        before, after = alpha(process.alpha, u), alpha(process.alpha, v)
        total.append(0.0 if u == v else math.inf if after <= 0 else math.log(before / after))
    return total


def rate(process: Process, height: int, t: float, level: int, step: float = 1e-5) -> float:
    """lambda_l(t) by a symmetric difference of the integral (independent of every closed form)."""
    return integrated_rates(process, height, t - step, t + step)[level] / (2 * step)


@dataclass
class Chain:
    """One position's chain over places, as matrices. Rows are 'from', columns are 'to'."""

    tree: Tree
    process: Process

    def __post_init__(self) -> None:
        table = self.tree.ancestor.tolist()
        self.places = [(h, node) for h in range(self.tree.height + 1) for node in sorted(set(table[h]))]
        self.index = {place: i for i, place in enumerate(self.places)}
        self.parent = {(h, table[h][x]): (h + 1, table[h + 1][x])
                       for h in range(self.tree.height) for x in range(self.tree.size)}

    def climb(self, level: int) -> Tensor:
        """The unit generator of one level: each place at this height leaves for its parent with rate 1."""
        matrix = torch.zeros(len(self.places), len(self.places), dtype=FLOAT)
        for place, above in self.parent.items():
            if place[0] == level:
                matrix[self.index[place], self.index[above]] = 1
                matrix[self.index[place], self.index[place]] = -1
        return matrix

    def generator(self, t: float) -> Tensor:
        """Q_t."""
        return sum((rate(self.process, self.tree.height, t, level) * self.climb(level)
                    for level in range(self.tree.height)), torch.zeros(len(self.places), len(self.places), dtype=FLOAT))

    def cumulative(self, s: float, t: float) -> Tensor:
        """P_{t|s}: within a stretch all levels' rates are proportional, so it is one matrix exponential."""
        points = [s, *(edge for edge in self._edges() if s < edge < t), t]
        product = torch.eye(len(self.places), dtype=FLOAT)
        for a, b in zip(points, points[1:]):
            stretch = integrated_rates(self.process, self.tree.height, a, b)
            exponent = torch.zeros_like(product)
            for level, amount in enumerate(stretch):  # e^-700 is zero in effect and a safe exponent for an infinite rate
                exponent += min(amount, 700.0) * self.climb(level)
            product = product @ torch.matrix_exp(exponent)
        return product

    def _edges(self) -> list[float]:
        return self.process.edges(self.tree.height) if isinstance(self.process, Cascade) else []

    def marginal(self, t: float) -> Tensor:
        """q(place at t | token), one row a token."""
        starts = [self.index[(0, token)] for token in range(self.tree.size)]
        return self.cumulative(0.0, t)[starts]

    def reverse(self, s: float, t: float, prior: Tensor) -> Tensor:
        """p(place at s | place at t) for one position with token distribution `prior`, by Bayes' rule (rows: t)."""
        before, after = prior @ self.marginal(s), prior @ self.marginal(t)
        joint = before[:, None] * self.cumulative(s, t)
        return (joint / after.clamp(min=1e-300)).T

    def predicted(self, place: tuple[int, int], children: Tensor, t: float) -> Tensor:
        """q_t(. | x_theta) as seen from a place: its predicted children mixed, and the shared path above it."""
        height = place[0]
        occupancy = torch.zeros(self.tree.height + 1, dtype=FLOAT)
        token_row = self.marginal(t)[0]
        for (h, _), mass in zip(self.places, token_row):
            occupancy[h] += mass
        row = torch.zeros(len(self.places), dtype=FLOAT)
        step = place
        while True:
            row[self.index[step]] = occupancy[step[0]]
            if step not in self.parent:
                break
            step = self.parent[step]
        if height:
            for slot, child in enumerate(self.children_of(place)):
                row[self.index[child]] = children[slot] * occupancy[height - 1]
        return row

    def children_of(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """The places below, in slot order."""
        height, node = place
        if node < self.tree.size:
            return [(height - 1, node)]
        count = int(self.tree.num_children[node])
        return [(height - 1, int(child)) for child in self.tree.children[node - self.tree.size, :count]]

    def backward_rates(self, place: tuple[int, int], children: Tensor, t: float) -> Tensor:
        """hat Q_t(place, .): Q_t(z', place) q(z' | x_theta) / q(place | x_theta), its row made to sum to zero."""
        here = self.index[place]
        predicted = self.predicted(place, children, t)
        row = self.generator(t)[:, here] * predicted / predicted[here]
        return row - torch.nn.functional.one_hot(torch.tensor(here), len(row)) * row.sum()

    def lemma_integrand(self, place: tuple[int, int], token: int, children: Tensor, t: float) -> float:
        """The bracket of the general continuous-time bound at one place of one position with true token `token`."""
        here, rates = self.index[place], self.generator(t)[:, self.index[place]]
        truth, predicted = self.marginal(t)[token], self.predicted(place, children, t)
        total = 0.0
        for other in range(len(self.places)):
            if other != here and rates[other] > 0 and truth[other] > 0:
                ratio = truth[other] / truth[here]
                total += float(rates[other] * ratio * torch.log(predicted[other] / predicted[here] / ratio))
        return total - float((rates * predicted / predicted[here]).sum())


def panels(process: Process, height: int, count: int = 24) -> list[tuple[float, float]]:
    """Quadrature nodes and weights for Int_0^1 dt: Gauss-Legendre by level, or by unit panels of s = -log(1-t)."""
    nodes, weights = legendre(count)
    if isinstance(process, Cascade):
        edges = process.edges(height)
        return [(low + (high - low) * x, (high - low) * w)
                for low, high in zip(edges, edges[1:]) for x, w in zip(nodes, weights)]
    result = []
    for start in range(36):  # the rest weighs e^-36 s^H, below the proofs' tolerance
        result += [(-math.expm1(-(start + x)), w * math.exp(-(start + x))) for x, w in zip(nodes, weights)]
    return result


def legendre(count: int) -> tuple[list[float], list[float]]:
    """Gauss-Legendre nodes and weights on [0, 1], from the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, count, dtype=FLOAT)
    off = k / torch.sqrt(4 * k * k - 1)
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return ((values + 1) / 2).tolist(), (vectors[0] ** 2).tolist()


class Enumeration:
    """All sequences of S tokens with a joint distribution, all patterns of heights, all exact posteriors."""

    def __init__(self, tree: Tree, probabilities: Tensor):
        self.tree, self.length = tree, probabilities.dim()
        self.joint = probabilities.to(FLOAT) / probabilities.sum()
        self.sequences = list(itertools.product(range(tree.size), repeat=self.length))
        self.patterns = list(itertools.product(range(tree.height + 1), repeat=self.length))
        self.ancestor = tree.ancestor.tolist()

    def nodes(self, x: tuple[int, ...], heights: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.ancestor[h][token] for h, token in zip(heights, x))

    def below(self, node: int) -> list[int]:
        """The tokens below a node (a token stands below itself)."""
        return [x for x in range(self.tree.size) if any(level[x] == node for level in self.ancestor)]

    def exact(self, nodes: tuple[int, ...], t: float = 0.5) -> Tensor:
        """The exact denoiser: the posterior of every position's child given the *whole* noisy sequence (S, K)."""
        joint = self.joint
        for axis, node in enumerate(nodes):
            mask = torch.zeros(self.tree.size, dtype=FLOAT)
            mask[self.below(node)] = 1
            joint = joint * mask.view([-1 if a == axis else 1 for a in range(self.length)])
        result = torch.zeros(self.length, self.tree.branching, dtype=FLOAT)
        for axis, node in enumerate(nodes):
            tokens = joint.sum([a for a in range(self.length) if a != axis]) if self.length > 1 else joint
            if node < self.tree.size:
                result[axis, 0] = 1
                continue
            for slot in range(int(self.tree.num_children[node])):
                child = int(self.tree.children[node - self.tree.size, slot])
                result[axis, slot] = tokens[self.below(child)].sum() / tokens.sum().clamp(min=1e-300)
        return result

    def bound(self, process: Process, x: tuple[int, ...], predict: Predictor) -> Tensor:
        """The continuous-time bound of one sequence, per level (H,), by enumeration of z and quadrature of t."""
        H = self.tree.height
        total = torch.zeros(H, dtype=FLOAT)
        asked: dict[tuple[tuple[int, ...], float], Tensor] = {}
        for t, dt in panels(process, H):
            w = process.occupancy(torch.tensor(t, dtype=FLOAT), H).tolist()
            lam_w = [rate_times_occupancy(process, H, t, level) for level in range(H)]
            for heights in self.patterns:
                others = [w[h] for h in heights]
                nodes = self.nodes(x, heights)
                if sum(o == 0 for o in others) > 1 or not any(h and self.active(z) for h, z in zip(heights, nodes)):
                    continue
                if (key := (nodes, t)) not in asked:
                    asked[key] = predict(nodes, t)
                for i, h in enumerate(heights):
                    if h and self.active(nodes[i]):
                        rest = math.prod(o for j, o in enumerate(others) if j != i)
                        if rest and lam_w[h - 1]:
                            p = asked[key][i, int(self.tree.slot[h - 1, x[i]])]
                            total[h - 1] -= dt * lam_w[h - 1] * rest * torch.log(p)
        return total

    def active(self, node: int) -> bool:
        return int(self.tree.num_children[node]) > 1

    def law(self, process: Process, times: list[float], predict: Predictor) -> dict[tuple[int, ...], float]:
        """The distribution over token sequences of the sampler on a time grid, followed exactly."""
        H, S = self.tree.height, self.length
        states = {((H,) * S, (self.tree.root,) * S): 1.0}
        for later, earlier in zip(times, times[1:]):
            for high, low in process.segments(later, earlier, H):
                states = self._descend(process.reverse(high, low, H).tolist(), states, predict, high)
        return {nodes: mass for (_, nodes), mass in states.items()}

    def _descend(self, kernel: list[list[float]], states: dict, predict: Predictor, t: float) -> dict:
        """One segment: targets for all positions at once, then one level at a time until all have arrived."""
        waiting: dict = {}
        for (heights, nodes), mass in states.items():
            for target in itertools.product(*(range(h + 1) for h in heights)):
                share = mass * math.prod(kernel[h][g] for h, g in zip(heights, target))
                if share:
                    waiting[heights, nodes, target] = waiting.get((heights, nodes, target), 0.0) + share
        arrived: dict = {}
        while waiting:
            moved: dict = {}
            for (heights, nodes, target), mass in waiting.items():
                if heights == target:
                    arrived[heights, nodes] = arrived.get((heights, nodes), 0.0) + mass
                    continue
                p = predict(nodes, t)
                options = [self._below_one(h, z, p[i]) if h > g else [(h, z, 1.0)]
                           for i, (h, g, z) in enumerate(zip(heights, target, nodes))]
                for choice in itertools.product(*options):
                    share = mass * math.prod(c[2] for c in choice)
                    if share:
                        key = tuple(c[0] for c in choice), tuple(c[1] for c in choice), target
                        moved[key] = moved.get(key, 0.0) + share
            waiting = moved
        return arrived

    def _below_one(self, height: int, node: int, p: Tensor) -> list[tuple[int, int, float]]:
        if node < self.tree.size:
            return [(height - 1, node, 1.0)]
        count = int(self.tree.num_children[node])
        kids = self.tree.children[node - self.tree.size, :count].tolist()
        return [(height - 1, kid, float(q) if count > 1 else 1.0) for kid, q in zip(kids, p[:count])]


def rate_times_occupancy(process: Process, height: int, t: float, level: int) -> float:
    """lambda_l w_l: the flow from height l to l+1, which integrates to one (from the definitions, no limits taken)."""
    if isinstance(process, Overlapping):
        s = -math.log1p(-t)
        return s**level / math.factorial(level)
    assert isinstance(process, Cascade), "the oracle knows the processes of this package"
    low, high = process.edges(height)[level: level + 2]
    if not low <= t <= high:
        return 0.0
    u = (t - low) / (high - low)
    match process.alpha:
        case Linear():
            slope = 1.0
        case Cosine():
            slope = math.pi / 2 * math.sin(math.pi / 2 * (1 - u))
        case Polynomial(power=power):
            slope = power * u ** (power - 1)
        case _:
            raise TypeError(f"the oracle does not know the schedule {process.alpha}")
    return slope / (high - low)
