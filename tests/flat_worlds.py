"""Toys for the proofs of flat jump processes: models that are tables, exact answers, and the loss of the product integrated."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdlm.objectives import GiddMethod, SeddMethod
from tdlm.process import flat_oracle as oracle
from tdlm.process.flat import FlatProcess, Uniform
from tdlm.process.flat_oracle import FlatWorld
from tdlm.tree import Tree

FLOAT = torch.float64
Predict = Callable[[tuple[int, ...], float], Tensor]


class RawHead:
    """`hidden` already holds raw numbers over the tokens."""

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return hidden

    def log_probs(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return hidden.log_softmax(-1)

    def nll(self, hidden: Tensor, parent: Tensor, slot: Tensor) -> Tensor:
        return -self.log_probs(hidden, parent).gather(1, slot[:, None])[:, 0]


class Table:
    """A 'network' that looks its raw numbers (S, V) up: any function of (state, time)."""

    head: Any = RawHead()

    def __init__(self, predict: Predict, told_time: bool = True):
        self.predict, self.told_time, self.seen = predict, told_time, 0
        self.known: dict[tuple[tuple[int, ...], float], Tensor] = {}

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        self.seen += len(nodes)
        keys = [(tuple(row), float(t)) for row, t in zip(nodes.tolist(), time)]
        for key in keys:
            if key not in self.known:
                self.known[key] = self.predict(*key)
        return torch.stack([self.known[key] for key in keys])


def arbitrary(size: int, seed: int, spread: float = 1.0) -> Predict:
    """Fixed raw numbers for every state, denoiser and score of nothing."""
    def predict(state: tuple[int, ...], t: float) -> Tensor:
        generator = torch.Generator().manual_seed(hash((state, seed)) % (1 << 62))
        return torch.randn(len(state), size, generator=generator, dtype=FLOAT) * spread
    return predict


def softmax(predict: Predict) -> Predict:
    return lambda state, t: predict(state, t).softmax(-1)


def ratios_from(process: FlatProcess, predict: Predict) -> oracle.Ratios:
    """SEDD's ratios from raw numbers over tokens; nothing ever comes from MASK."""
    def ratios(state: tuple[int, ...], t: float) -> Tensor:
        raw = predict(state, t)
        return oracle.scores(process, torch.cat([raw, torch.full_like(raw[:, :1], -torch.inf)], 1), state, t)
    return ratios


def to_raw(world: FlatWorld) -> Predict:
    """The raw numbers of the exact ratios: the output transform undone."""
    def predict(state: tuple[int, ...], t: float) -> Tensor:
        log_ratio = world.exact_ratios(state, t)[:, : world.size].clamp(min=1e-300).log()
        return log_ratio if isinstance(world.process, Uniform) else log_ratio + math.log(world.size * t / (1 - t))
    return predict


def objective(method: GiddMethod | SeddMethod, size: int, pad_id: int | None = None) -> Any:
    return method.objective(Tree.star(size), pad_id)


def integrate(target, model: Table, world: FlatWorld, x: tuple[int, ...]) -> float:
    """The product's loss, averaged exactly: quadrature over the drawn time, enumeration over the drawn states."""
    rows, chances = [], []
    for t, dt in oracle.panels(1 / 8):
        K = world.at(t)
        for state in world.states:
            if chance := math.prod(float(K[token, z]) for token, z in zip(x, state)):
                rows.append((t, state))
                chances.append(dt * chance)
    time = torch.tensor([t for t, _ in rows], dtype=FLOAT)
    states = torch.tensor([state for _, state in rows])
    loss = target.score(model, torch.tensor(x).expand_as(states), states, time, torch.ones_like(time))
    return float(loss.bound @ torch.tensor(chances, dtype=FLOAT))


def within_five_sigma(count: Tensor, p: Tensor) -> bool:
    n = count.sum()
    return bool(((count - n * p).abs() <= 5 * torch.sqrt(n * p * (1 - p)) + 1e-6).all())
