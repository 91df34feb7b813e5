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
class b gains: the greater of two estimates, both lower bounds but for their smoothing. Either b goes on meeting contexts
as it does (counts of x times log T/R, T smoothed by one count a cell on average: one matrix product), or it becomes the
class of x, and all that its members tell is lost: without this no frequent token ever leaves a crowd of frequent tokens for
a class of rare ones. Tokens that gain propose to go, the best first: to a class with room, or else against the member of
that class which makes the sum the greatest. Any subset of a round's steps keeps the sizes in bounds. Steps are carried
out in batches; a batch stays only if J, taken from the exact tables, has risen; otherwise its halves are tried. So J
never falls, and what is approximate above costs rounds, not correctness. Tables hold whole numbers in float64: they are
exact, and undone exactly.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .neighbours import Neighbours, other_side

_NUMBERS = 1 << 23  # numbers in a block of dense rows
_ENTRIES = 1 << 22  # entries of rows looked at together
_LEAST = 1e-9  # a rise of J below this share of it is rounding


@dataclass(frozen=True)
class Step:
    """Tokens that move together, and where to: one into a class with room, or two that change places."""

    tokens: tuple[int, ...]
    to: tuple[int, ...]


@dataclass(frozen=True)
class Leads:
    """What n tokens gain by leaving their classes for each other class."""

    join: np.ndarray
    """(n, K) float32: if that class meets contexts as before; -inf for the own."""
    rule: np.ndarray
    """(n,): if that class becomes theirs, before what it tells now is taken off."""
    held: np.ndarray
    """(K,): what each class tells now."""


class Classes:
    """Labels of all tokens (V,), -1 for those that take no part, and the tables of pairs of classes (O, K, M)."""

    def __init__(self, near: Neighbours, label: np.ndarray, k: int, context: np.ndarray | None = None):
        self.near, self.k, self.label = near, k, label.astype(np.int64)
        self.mutual = context is None
        self.context = self.label if context is None else context.astype(np.int64)
        self.contexts = k if context is None else int(context.max()) + 1
        self.weight = 1 / (np.arange(near.offsets) // 2 + 1.0)
        self.table = np.zeros((near.offsets, k, self.contexts))
        self._add(tokens := np.flatnonzero(self.label >= 0), self.label[tokens], 1)
        self.value = self.measure()

    def _blocks(self, tokens: np.ndarray, most: int) -> Iterator[slice]:
        """Stretches of `tokens`: at most so many, and of not too many entries."""
        load = np.r_[0, np.cumsum(self.near.start[tokens + 1] - self.near.start[tokens])]
        first = 0
        while first < len(tokens):
            last = int(np.searchsorted(load, load[first] + _ENTRIES, side="right")) - 1
            last = min(max(last, first + 1), first + most)
            yield slice(first, last)
            first = last

    def _entries(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Which of `tokens`, offset number, other token and count of every entry of their rows."""
        owner, place = self.near.rows(tokens)
        offset, other = np.divmod(self.near.code[place].astype(np.int64), self.near.size)
        return owner, offset, other, self.near.count[place].astype(np.float64)

    def _add(self, tokens: np.ndarray, where: np.ndarray, sign: int) -> None:
        """The rows of `tokens`, counted into the classes `where`, with the contexts as they are now."""
        for part in self._blocks(tokens, len(tokens)):
            owner, offset, other, count = self._entries(tokens[part])
            self._count(offset, where[part][owner], self.context[other], sign * count)

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
        for part in self._blocks(tokens, len(tokens)) if self.mutual else ():
            owner, offset, other, count = self._entries(tokens[part])
            row = self.label[other]
            self._count(other_side(offset), row, was[part][owner], -count)
            self._count(other_side(offset), row, to[part][owner], count)
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

    def leads(self, tokens: np.ndarray, device: str) -> Leads:
        """What each token gains by moving from its class to each other, to first order and as the ruler of it."""
        chance = self.table.sum(1) / np.maximum(self.table.sum((1, 2)), 1)[:, None]  # (O, M)
        size = self.table.sum(2)  # (O, K)
        with np.errstate(divide="ignore", invalid="ignore"):
            smooth = (self.table / chance[:, None, :] + self.contexts) / (size[:, :, None] + self.contexts)
        offer = np.log(np.where(chance[:, None, :] > 0, smooth, 1)) * self.weight[:, None, None]
        held = _xlogx(self.table).sum(2) - _xlogx(size) - np.einsum("okm,om->ok", self.table, _log(chance))
        right = torch.from_numpy(offer.transpose(0, 2, 1).reshape(-1, self.k).astype(np.float32)).to(device)
        join = np.empty((len(tokens), self.k), np.float32)
        rule = np.empty(len(tokens))
        for rows in self._blocks(tokens, max(1, _NUMBERS // len(right))):
            part = tokens[rows]
            owner, offset, other, count = self._entries(part)
            place = owner * len(right) + offset * self.contexts + self.context[other]
            block = np.bincount(place, count, minlength=len(part) * len(right))
            left = torch.from_numpy(block.astype(np.float32).reshape(len(part), -1)).to(device)
            stay, alone = self._stay(part, block, size, _log(chance))
            join[rows] = (left @ right).cpu().numpy() - stay[:, None]
            rule[rows] = alone - stay
        join[np.arange(len(tokens)), self.label[tokens]] = -np.inf
        return Leads(join, rule, (held * self.weight[:, None]).sum(0))

    def _stay(self, part: np.ndarray, block: np.ndarray, size: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) what the tokens' classes lose with them, the others staying where they are, and what the tokens tell alone;
        both exact, and less what chance tells of the contexts."""
        place = np.flatnonzero(block)
        owner, column = np.divmod(place, len(block) // len(part))
        offset, context = np.divmod(column, self.contexts)
        count, own = block[place], self.label[part]
        cell = self.table[offset, own[owner], context]
        seen = block.reshape(len(part), -1, self.contexts).sum(2)  # (n, O)
        row = size[:, own].T
        usual = count * chance[offset, context]

        def told(cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return np.bincount(owner, self.weight[offset] * (cells - usual), minlength=len(part)) - rows @ self.weight

        return (told(_xlogx(cell) - _xlogx(cell - count), _xlogx(row) - _xlogx(row - seen)),
                told(_xlogx(count), _xlogx(seen)))


def _log(chance: np.ndarray) -> np.ndarray:
    """Logarithms, zero where there is nothing."""
    return np.log(np.where(chance > 0, chance, 1))


def _xlogx(count: np.ndarray) -> np.ndarray:
    """n log n of whole numbers."""
    return count * np.log(np.maximum(count, 1))


def exchange(near: Neighbours, label: np.ndarray, k: int, lo: int, hi: int, *, context: np.ndarray | None = None,
             weight: np.ndarray | None = None, most: float = np.inf, rounds: int = 12, enough: float = 1e-3, device: str = "cpu",
             say: Callable[[str], None] | None = None) -> tuple[np.ndarray, list[float]]:
    """Better labels (V,) from labels with lo..hi tokens a class (-1: no part of it), and J at the start and after each round.

    With `weight` (V,), classes within `most` in sum stay so, and no other gains weight. Tokens that the corpus does not have
    stay where they are. It ends after `rounds`, or when a round adds less than the share `enough` of J."""
    classes = Classes(near, label, k, context)
    tokens = np.flatnonzero((classes.label >= 0) & (np.diff(near.start) > 0))
    values = [classes.value]
    for turn in range(rounds if k > 1 and len(tokens) > 1 else 0):
        steps = propose(tokens, classes.label, classes.leads(tokens, device), k, lo, hi, weight, most)
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


def propose(tokens: np.ndarray, label: np.ndarray, leads: Leads, k: int, lo: int, hi: int,
            weight: np.ndarray | None = None, most: float = np.inf) -> list[Step]:
    """Steps that gain, the best first. Room is what a class has before the round, less what was promised: no step
    counts on another's, so every subset of the steps keeps the bounds."""
    part = label >= 0
    size = np.bincount(label[part], minlength=k)
    room, spare = hi - size, size - lo
    weight = np.zeros(len(label)) if weight is None else weight
    load, heavy = np.bincount(label[part], weight[part], minlength=k), weight[tokens]
    own = label[tokens]
    there = np.bincount(own, minlength=k)
    members = np.split(np.argsort(own, kind="stable"), np.cumsum(there)[:-1])
    held = leads.held.copy()
    free = np.ones(len(tokens), dtype=bool)
    steps = []
    for x in np.argsort(-np.maximum(leads.join.max(1), leads.rule - held.min()), kind="stable"):
        if not free[x]:
            continue
        a, lead = int(own[x]), np.maximum(leads.join[x], leads.rule[x] - held)
        lead[a] = -np.inf
        lead[(there == 0) & ((room <= 0) | (spare[a] <= 0))] = -np.inf  # no place, and nobody to change places with
        b = int(lead.argmax())
        if lead[b] <= 0:
            continue
        others = members[b][free[members[b]]]
        if room[b] > 0 and spare[a] > 0 and load[b] + heavy[x] <= most:
            load[b] += heavy[x]
            room[b] -= 1
            spare[a] -= 1
            steps.append(Step((int(tokens[x]),), (b,)))
        elif len(others) and lead[b] + leads.join[y := others[leads.join[others, a].argmax()], a] > 0 and (
                heavy[x] == heavy[y] or load[b if heavy[x] > heavy[y] else a] + abs(heavy[x] - heavy[y]) <= most):
            load[b if heavy[x] > heavy[y] else a] += abs(heavy[x] - heavy[y])
            free[y] = False
            there[b] -= 1
            steps.append(Step((int(tokens[x]), int(tokens[y])), (b, a)))
        else:
            continue
        free[x] = False
        there[a] -= 1
        held[b] += max(float(leads.rule[x]), 0.0)  # who comes now would rule over x too
    return steps
