"""The way down of the flat jump processes: every step draws every position that may change, from one evaluation.

A *rule* says where the walk starts, which positions a step from t to s may change, and from which row over the states
(V tokens and MASK) such a position is drawn. `Posterior` is GIDD's: exact Bayes under the prediction,

    q(z_s | z_t, x_theta)  ~  q(z_t | z_s) q_s(z_s | x_theta),

where temperature, top-p and min-p act on x_theta. At s = 0 it holds neither MASK nor noise, so the last step ends in tokens.
The grid (1, t_1), ..., (t_{N-1}, 0) is gone through as it stands: N steps, the network being told the noisier end.

Self-correction (GIDD): N steps are shared out, the larger half to the walk down; then, at most once for each step of the
other half, all positions of the finished text are predicted anew at temperature 0.1 as if t = 0.01, and of the proposals that
differ from the text the most probable one is put in. A text is left alone as soon as no proposal differs, or when the share
of its tokens that are the network's first choice has not reached a new maximum for more than 32 rounds.

Given tokens stand as tokens at all times and never change (as `shown` would ask: that is always so here). A sequence in
which nothing can change any more is not evaluated, and one in which nothing changed is not evaluated again if the network
is not told the time: its hidden states are kept, and the head is applied to them anew. Draws are float64.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..model.model import Network, autocast
from ..process import Cascade
from ..process.flat import Hybrid, posterior
from ..rng import Draws
from ..tree.tree import Tree
from .draw import Choice, Frame, Sampled, fixed_tokens, invert
from .grid import times_for

LIMIT = 2**25
"""Entries of one float64 table of rows; more positions are drawn in parts."""


@runtime_checkable
class Rule(Protocol):
    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """The state at t = 1."""
        ...

    def open(self, state: Int[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
        """The positions that a step may change."""
        ...

    def rows(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], later: float, earlier: float,
             choice: Choice) -> Float[Tensor, "M states"]:
        """What open positions are drawn from, over V tokens or over V tokens and MASK."""
        ...


@dataclass(frozen=True)
class Posterior:
    process: Hybrid

    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        return torch.full_like(uniform, self.process.size, dtype=torch.int64)

    def open(self, state: Int[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
        return torch.ones_like(state, dtype=torch.bool) if self.process.p_uniform else state == self.process.size

    def rows(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], later: float, earlier: float,
             choice: Choice) -> Float[Tensor, "M states"]:
        p = choice.probabilities(head.log_probs(hidden, torch.full_like(state, self.process.size)))
        return posterior(self.process, state, p, torch.full_like(p[:, 0], earlier), torch.full_like(p[:, 0], later))


@dataclass(frozen=True)
class Correction:
    """GIDD's own settings of self-correction."""

    temperature: float = 0.1
    time: float = 0.01
    patience: int = 32


@torch.no_grad()
def generate_flat(model: Network, rule: Rule, tree: Tree, shape: tuple[int, int], *, steps: int, draws: Draws,
                  prefix: Tensor | None = None, given: Tensor | None = None, shown: Tensor | None = None,
                  per_level: Sequence[int] | None = None, times: Sequence[float] | None = None, choice: Choice = Choice(),  # noqa: B008 - frozen
                  dtype: str = "float32", trace: bool = False, progress: Callable[[int, int], None] | None = None,
                  correction: Correction | None = None) -> Sampled:
    """Draw `shape` = (B, S) tokens; `correction` follows the walk down with rounds of self-correction."""
    rounds = steps // 2 if correction is not None else 0
    grid = times_for(Cascade(), 1, steps - rounds, per_level, times)
    fixed = fixed_tokens(shape, prefix, given, tree.size, tree.ancestor.device)
    walk = _Walk(model, rule, tree.size, fixed, draws, dtype)
    total, frames = len(grid) - 1 + rounds, [walk.frame(1.0)] if trace else []
    for number, (later, earlier) in enumerate(zip(grid, grid[1:])):
        moved = walk.step(later, earlier, choice, number)
        if trace and moved:
            frames.append(walk.frame(earlier))
        if progress is not None:
            progress(number + 1, total)
    if correction is not None:
        _correct(walk, correction, choice, rounds)
        if trace:
            frames.append(walk.frame(0.0))
        if progress is not None:
            progress(total, total)
    return Sampled(walk.state, walk.evaluations, walk.calls, total, frames)


class Drawn(NamedTuple):
    """Open positions, what was drawn for them, its probability and the most probable outcome."""

    row: Int[Tensor, "M"]
    column: Int[Tensor, "M"]
    outcome: Int[Tensor, "M"]
    probability: Float[Tensor, "M"]
    likeliest: Int[Tensor, "M"]


class _Walk:
    """The state of a batch, and the hidden states that were computed from it."""

    def __init__(self, model: Network, rule: Rule, size: int, fixed: Int[Tensor, "B S"], draws: Draws, dtype: str):
        self.model, self.rule, self.size, self.draws, self.dtype = model, rule, size, draws, dtype
        self.free = fixed < 0
        self.state = torch.where(self.free, rule.start(draws.uniform("start", fixed.shape[1])), fixed)
        self.evaluations = torch.zeros(len(fixed), dtype=torch.int64, device=fixed.device)
        self.known = torch.zeros(len(fixed), dtype=torch.bool, device=fixed.device)
        self.kept: Tensor | None = None
        self.calls = 0

    def hidden(self, rows: Int[Tensor, "rows"], time: float) -> Float[Tensor, "rows S d"]:
        """Hidden states of some rows, computed where they are not known."""
        asked = rows if self.model.told_time else rows[~self.known[rows]]
        if len(asked):
            when = torch.full((len(asked),), time, dtype=torch.float64, device=rows.device)
            fresh = self.model.hidden(self.state[asked], when, None)
            self.evaluations[asked] += 1
            self.calls += 1
            if self.kept is None:
                self.kept = fresh.new_empty(len(self.state), *fresh.shape[1:])
            self.kept[asked], self.known[asked] = fresh, True
        assert self.kept is not None, "rows that are known were computed once"
        return self.kept[rows]

    def draw(self, rows: Int[Tensor, "rows"], open: Bool[Tensor, "rows S"], time: float, tag: str,
             table: Callable[[Tensor, Tensor], Tensor]) -> Drawn:
        """Every open position from its row of `table(hidden, state)`, a few positions at a time."""
        row, column = open.nonzero(as_tuple=True)
        uniform = self.draws.uniform(tag, self.state.shape[1])[rows][row, column]
        drawn = Drawn(rows[row], column, torch.empty_like(row), torch.empty_like(uniform), torch.empty_like(row))
        with autocast(rows.device, self.dtype):
            hidden = self.hidden(rows, time)
            for part in torch.arange(len(row), device=row.device).split(max(1, LIMIT // self.size)):
                p = table(hidden[row[part], column[part]], self.state[drawn.row[part], column[part]])
                drawn.outcome[part], drawn.likeliest[part] = invert(p, uniform[part]), p.argmax(1)
                drawn.probability[part] = p.gather(1, drawn.outcome[part][:, None])[:, 0]
        return drawn

    def step(self, later: float, earlier: float, choice: Choice, number: int) -> bool:
        """One step down; whether anything changed."""
        open = self.rule.open(self.state) & self.free
        rows = open.any(1).nonzero()[:, 0]
        if not len(rows):
            return False

        def table(hidden: Tensor, state: Tensor) -> Tensor:
            return self.rule.rows(self.model.head, hidden, state, later, earlier, choice)

        drawn = self.draw(rows, open[rows], later, f"token {number}", table)
        return self.put(drawn.row, drawn.column, drawn.outcome)

    def put(self, row: Int[Tensor, "M"], column: Int[Tensor, "M"], token: Int[Tensor, "M"]) -> bool:
        changed = self.state[row, column] != token
        self.state[row, column] = token
        self.known[row[changed]] = False
        return bool(changed.any())

    def frame(self, time: float) -> Frame:
        state = self.state[0]
        return Frame(time, int(self.evaluations[0]), (state == self.size).long().tolist(), state.tolist())


def _correct(walk: _Walk, correction: Correction, choice: Choice, rounds: int) -> None:
    """Self-correction of finished texts: one token a round, until nothing wants to change or nothing gets better."""
    choice = replace(choice, temperature=correction.temperature)
    root, count = walk.size, walk.free.sum(1)
    best = torch.zeros(len(walk.state), dtype=torch.float64, device=walk.state.device)
    waited, going = torch.zeros_like(count), count > 0

    def table(hidden: Tensor, state: Tensor) -> Tensor:
        return choice.probabilities(walk.model.head.log_probs(hidden, torch.full_like(state, root)))

    for number in range(rounds):
        rows = going.nonzero()[:, 0]
        if not len(rows):
            return
        drawn = walk.draw(rows, walk.free[rows], correction.time, f"correct {number}", table)
        text = walk.state.clone()
        score = torch.zeros(text.shape, dtype=torch.float64, device=text.device)
        score[drawn.row, drawn.column] = drawn.probability * (drawn.outcome != text[drawn.row, drawn.column])
        proposal, likeliest = text.clone(), text.clone()
        proposal[drawn.row, drawn.column], likeliest[drawn.row, drawn.column] = drawn.outcome, drawn.likeliest
        score, column = score.max(1)
        row = torch.arange(len(text), device=text.device)
        text[row, column] = proposal[row, column]
        agreed = ((text == likeliest) & walk.free).sum(1).double() / count.clamp(min=1)
        waited = torch.where(agreed > best, 0, waited + 1)
        best = torch.maximum(best, agreed)
        going = going & (score > 0) & (waited <= correction.patience)
        chosen = going.nonzero()[:, 0]
        walk.put(chosen, column[chosen], text[chosen, column[chosen]])
