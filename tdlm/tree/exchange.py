"""Exchange clustering: classes whose neighbours tell the most about them, and which tell the most about their neighbours.

Between its neighbours a token is first known by its class: the classes around it are what the model reads when it predicts
that class, and the class is what it has when it predicts the tokens around. Mutual information measures both at once, and it
is the same from the left and from the right. With c(x) the class of token x, classes are chosen to raise

    J(c) = sum over d = 1..W of 1/d I( c(x_i) ; c(x_i+d) )      nats a token,

    N I_d = sum_ab T log T - sum_a R log R - sum_b C log C + N log N,    T = T_d(a, b) pairs of classes at distance d,

with R, C, N the row, column and grand totals of T. N (I_d - H) with H the entropy of a token is the log-likelihood of the class
bigram model p(x_i+d | x_i) = p(c(x_i+d) | c(x_i)) p(x_i+d | c(x_i+d)) at its best, in either direction: for W = 1 this is what
Brown et al. (1992) and exchange algorithms (Kneser and Ney 1993) raise. With `context`, a fixed class for every token as
neighbour, it is one-sided, the classes of a part of the tokens among themselves:

    J(c) = 1/2 sum over o = +-1..+-W of 1/|o| I( c(x_i) ; context(x_i+o) ).

A round asks for every token x what leaving its class costs (exact, with the others where they are) and what joining each other
class gains (to first order: counts times log T/R, T smoothed by one count a cell on average; one matrix product). Tokens
that gain propose to go, the best first: to a class with room, or else against the member of that class which makes the
sum the greatest. Any subset of a round's steps keeps the sizes in bounds. Steps are carried out in batches; a batch
stays only if J, taken from the exact tables, has risen; otherwise its halves are tried. So J never falls, and what is
approximate above costs rounds, not correctness. Tables hold whole numbers in float64: they are exact, and undone exactly.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .neighbours import Neighbours, other_side

_NUMBERS = 1 << 23  # numbers in a block of dense rows
_LEAST = 1e-9  # a rise of J below this share of it is rounding


@dataclass(frozen=True)
class Step:
    """Tokens that move together, and where to: one into a class with room, or two that change places."""

    tokens: tuple[int, ...]
    to: tuple[int, ...]


class Classes:
    """Labels of all tokens (V,), -1 for those that take no part, and the tables of pairs of classes (O, K, M)."""

    def __init__(self, near: Neighbours, label: np.ndarray, k: int, context: np.ndarray | None = None):
        self.near, self.k, self.label = near, k, label.astype(np.int64)
        self.mutual = context is None
        self.context = self.label if context is None else context.astype(np.int64)
        self.contexts = k if context is None else int(context.max()) + 1
        self.weight = 1 / (np.arange(near.offsets) // 2 + 1.0)
        self.table = np.zeros((near.offsets, k, self.contexts))
        tokens = np.flatnonzero(self.label >= 0)
        for part in np.array_split(tokens, max(1, int(np.ceil(len(near.code) / (1 << 24))))):
            self._add(part, self.label[part], 1)
        self.value = self.measure()

    def _entries(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Which of `tokens`, offset number, other token and count of every entry of their rows."""
        owner, place = self.near.rows(tokens)
        offset, other = np.divmod(self.near.code[place].astype(np.int64), self.near.size)
        return owner, offset, other, self.near.count[place].astype(np.float64)

    def _add(self, tokens: np.ndarray, where: np.ndarray, sign: int) -> None:
        """The rows of `tokens`, counted into the classes `where`, with the contexts as they are now."""
        owner, offset, other, count = self._entries(tokens)
        self._count(offset, where[owner], self.context[other], sign * count)

    def _count(self, offset: np.ndarray, row: np.ndarray, column: np.ndarray, count: np.ndarray) -> None:
        flat = (offset * self.k + row) * self.contexts + column
        if len(flat) * 4 > self.table.size:
            self.table += np.bincount(flat, count, minlength=self.table.size).reshape(self.table.shape)
        else:
            np.add.at(self.table.reshape(-1), flat, count)

    def move(self, tokens: np.ndarray, to: np.ndarray) -> None:
        """New classes for some tokens. With C the one-hot classes and D their change, the pairs C'NC' - CNC are
        D N C' (their rows) + C N D (their columns, read from their own rows on the other side)."""
        was = self.label[tokens]
        if self.mutual:
            owner, offset, other, count = self._entries(tokens)
            row = self.label[other]
            self._count(other_side(offset), row, was[owner], -count)
            self._count(other_side(offset), row, to[owner], count)
        self.label[tokens] = to
        self._add(tokens, was, -1)
        self._add(tokens, to, 1)

    def measure(self) -> float:
        """J from the tables. With mutual classes the offsets d and -d have the same table, turned."""
        step = 2 if self.mutual else 1
        total = 0.0
        for offset in range(0, len(self.table), step):
            table = self.table[offset]
            pairs = table.sum()
            if pairs:
                nats = _xlogx(table).sum() - _xlogx(table.sum(1)).sum() - _xlogx(table.sum(0)).sum() + _xlogx(pairs)
                total += float(self.weight[offset] * nats / pairs) * step / 2
        return total

    def attempt(self, steps: list[Step]) -> int:
        """Carry the steps out if J rises, else try the two halves; how many stayed."""
        tokens = np.array([token for step in steps for token in step.tokens])
        to = np.array([target for step in steps for target in step.to])
        was = self.label[tokens]
        self.move(tokens, to)
        value = self.measure()
        if value > self.value * (1 + _LEAST):
            self.value = value
            return len(steps)
        self.move(tokens, was)
        half = len(steps) // 2
        return self.attempt(steps[:half]) + self.attempt(steps[half:]) if half else 0

    def leads(self, tokens: np.ndarray, device: str) -> np.ndarray:
        """(n, K) float32: what each token gains by moving from its class to each other; -inf for its own."""
        chance = self.table.sum(1) / np.maximum(self.table.sum((1, 2)), 1)[:, None]  # (O, M)
        size = self.table.sum(2)  # (O, K)
        smooth = self.table + (self.contexts * chance)[:, None, :]
        with np.errstate(divide="ignore"):
            offer = np.log(smooth / (size[:, :, None] + self.contexts)) * self.weight[:, None, None]
        offer = np.where(smooth > 0, offer, 0).transpose(0, 2, 1).reshape(-1, self.k)  # a context nobody has: no counts
        right = torch.from_numpy(offer.astype(np.float32)).to(device)
        width = len(right)
        lead = np.empty((len(tokens), self.k), np.float32)
        step = max(1, _NUMBERS // width)
        for first in range(0, len(tokens), step):
            part = tokens[first : first + step]
            owner, offset, other, count = self._entries(part)
            place = owner * width + offset * self.contexts + self.context[other]
            block = np.bincount(place, count, minlength=len(part) * width)
            left = torch.from_numpy(block.astype(np.float32).reshape(len(part), width)).to(device)
            lead[first : first + len(part)] = (left @ right).cpu().numpy()
            lead[first : first + len(part)] -= self._stay(part, block, width, size)[:, None]
        lead[np.arange(len(tokens)), self.label[tokens]] = -np.inf
        return lead

    def _stay(self, part: np.ndarray, block: np.ndarray, width: int, size: np.ndarray) -> np.ndarray:
        """(n,) what the tokens' own classes lose with them, exactly, the others staying where they are."""
        place = np.flatnonzero(block)
        owner, column = np.divmod(place, width)
        offset, context = np.divmod(column, self.contexts)
        count, own = block[place], self.label[part]
        cell = self.table[offset, own[owner], context]
        total = np.bincount(owner, self.weight[offset] * (_xlogx(cell) - _xlogx(cell - count)), minlength=len(part))
        seen = block.reshape(len(part), -1, self.contexts).sum(2)  # (n, O)
        row = size[:, own].T
        return total - ((_xlogx(row) - _xlogx(row - seen)) * self.weight).sum(1)


def _xlogx(count: np.ndarray) -> np.ndarray:
    """n log n of whole numbers."""
    return count * np.log(np.maximum(count, 1))


def exchange(near: Neighbours, label: np.ndarray, k: int, lo: int, hi: int, *, context: np.ndarray | None = None,
             rounds: int = 12, enough: float = 1e-3, device: str = "cpu",
             say: Callable[[str], None] | None = None) -> tuple[np.ndarray, list[float]]:
    """Better labels (V,) from labels with lo..hi tokens a class (-1: no part of it), and J at the start and after each round.

    Tokens that the corpus does not have stay where they are. It ends after `rounds`, or when a round adds less than the share
    `enough` of J."""
    classes = Classes(near, label, k, context)
    tokens = np.flatnonzero((classes.label >= 0) & (np.diff(near.start) > 0))
    values = [classes.value]
    for turn in range(rounds if k > 1 and len(tokens) > 1 else 0):
        steps = propose(tokens, classes.label, classes.leads(tokens, device), k, lo, hi)
        stayed, batch, first = 0, 16, 0
        while first < len(steps):  # the first steps are frequent tokens, which change much for one another
            stayed += classes.attempt(steps[first : first + batch])
            first, batch = first + batch, min(2 * batch, 1024)
        values.append(classes.value)
        if say is not None:
            say(f"exchange: round {turn + 1}, {stayed:,} of {len(steps):,} steps, {classes.value:.4f} nats")
        if values[-1] - values[-2] <= enough * values[-1]:
            break
    return classes.label, values


def propose(tokens: np.ndarray, label: np.ndarray, lead: np.ndarray, k: int, lo: int, hi: int) -> list[Step]:
    """Steps that gain, the best first. Room is what a class has before the round, less what was promised: nobody
    counts on another's leaving, so every subset of the steps keeps the bounds."""
    size = np.bincount(label[label >= 0], minlength=k)
    room, spare = hi - size, size - lo
    own = label[tokens]
    order = np.argsort(own, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(own, minlength=k))[:-1])
    target = lead.argmax(1)
    gain = lead[np.arange(len(tokens)), target]
    free = np.ones(len(tokens), dtype=bool)
    steps = []
    for x in np.argsort(-gain, kind="stable"):
        if gain[x] <= 0:
            break
        if not free[x]:
            continue
        a, b = int(own[x]), int(target[x])
        if room[b] > 0 and spare[a] > 0:
            room[b] -= 1
            spare[a] -= 1
            free[x] = False
            steps.append(Step((int(tokens[x]),), (b,)))
            continue
        others = members[b][free[members[b]]]
        if not len(others):
            continue
        y = others[lead[others, a].argmax()]
        if gain[x] + lead[y, a] > 0:
            free[x] = free[y] = False
            steps.append(Step((int(tokens[x]), int(tokens[y])), (b, a)))
    return steps
