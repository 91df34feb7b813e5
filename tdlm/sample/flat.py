"""The way down of the flat jump processes: every step draws the positions that may change, from one evaluation.

A *rule* says where the walk starts, which positions a step from t to s may change, and how such a position is drawn.
`Posterior` is GIDD's: exact Bayes under the prediction. With z = z_t, q the marginals, (keep, m, b)_ts the kernel of the step
and k(MASK) = m_ts, k(token) = b_ts,

    q(z_s | z_t = z, x_theta)  ~  k(z) q_s(z_s | x_theta)  +  [z_s = z] keep_ts q_s(z | x_theta)

is a mixture: with probability

    go  =  k(z) / (k(z) + keep_ts q_s(z | x_theta))

the position is drawn afresh from q_s(. | x_theta) = alpha_s x_theta + b_s + m_s [MASK], else it stays. At MASK go is known
(q_s(MASK) = m_s), at a token q_s(z | x_theta) >= b_s bounds it, and whether a fresh draw comes from x_theta, from the noise or
is MASK does not depend on x_theta either. So with one number for `go` and one for the fresh draw nearly all positions are
seen to stay before the network is asked: only the few others reach the head, and a row without any is not evaluated.
Temperature, top-p and min-p act on x_theta. At s = 0 there is neither MASK nor noise, so the last step ends in tokens.
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
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..model.model import Network, autocast
from ..process import Cascade
from ..process.flat import Hybrid
from ..rng import Draws, sent
from ..tree.tree import Tree
from .draw import Choice, Film, Frame, Sampled, at_home, fixed_tokens, in_parts, invert
from .grid import times_for
from .plan import Falls, Round, Rounds, Segment, segments
from .replay import Replay


@runtime_checkable
class Plan(Protocol):
    """What one walk knows of its positions without asking the network."""

    def places(self, state: Int[Tensor, "B S"], uniform: Float[Tensor, "B S numbers"], later: float,
               earlier: float) -> Bool[Tensor, "B S"]:
        """The positions that this step may change, on the processor."""
        ...


@runtime_checkable
class Rule(Protocol):
    numbers: int
    """Random numbers that a position takes each step."""

    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """The state at t = 1."""
        ...

    def plan(self, free: Bool[Tensor, "B S"]) -> Plan:
        ...

    def outcome(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], uniform: Float[Tensor, "M numbers"],
                later: float, earlier: float, choice: Choice) -> Int[Tensor, "M"]:
        """Where such positions go."""
        ...


class Looking:
    """Which positions may change is seen from their state alone; the processor waits for it."""

    def __init__(self, free: Bool[Tensor, "B S"], may_change: Callable[[Tensor], Tensor]):
        self.free, self.may_change = free, may_change

    def places(self, state: Int[Tensor, "B S"], uniform: Float[Tensor, "B S numbers"], later: float,
               earlier: float) -> Bool[Tensor, "B S"]:
        return self.may_change(state).cpu() & self.free


@dataclass(frozen=True)
class Posterior:
    process: Hybrid
    numbers = 2

    def start(self, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        return torch.full_like(uniform, self.process.size, dtype=torch.int64)

    def plan(self, free: Bool[Tensor, "B S"]) -> Plan:
        return Foreseen(self.process, free)

    def outcome(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], uniform: Float[Tensor, "M 2"],
                later: float, earlier: float, choice: Choice) -> Int[Tensor, "M"]:
        return self.drawn(head, hidden, state, uniform, _step(self.process, later, earlier), choice)

    def drawn(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"], uniform: Float[Tensor, "M 2"],
              step: Step, choice: Choice) -> Int[Tensor, "M"]:
        size = self.process.size
        p = choice.probabilities(head.log_probs(hidden, torch.full_like(state, size)))
        own = p.gather(1, state.clamp(max=size - 1)[:, None])[:, 0]
        return mixture(size, state, uniform, step, own, lambda place: invert(p, place))


def mixture(size: int, state: Int[Tensor, "M"], uniform: Float[Tensor, "M 2"], step: Step, own: Float[Tensor, "M"],
            token: Callable[[Tensor], Tensor]) -> Int[Tensor, "M"]:
    """Where positions go: `own` is x_theta at the state (anything at MASK), `token` the token at a place of x_theta's
    cumulative distribution."""
    masked, (keep, to_mask, to_each, alpha, mask, each) = state == size, step
    here, to = torch.where(masked, mask, alpha * own.double() + each), torch.where(masked, to_mask, to_each)
    go, fresh = uniform[:, 0] * (to + keep * here) < to, uniform[:, 1]
    noise = ((fresh - alpha) / (each + (each == 0))).long().clamp(0, size - 1)  # no noise: never looked at
    seen = torch.where(fresh < alpha, token((fresh / alpha).clamp(max=1)), noise)
    return torch.where(go, torch.where(fresh < 1 - mask, seen, size), state)


Step = Sequence[float] | Sequence[Float[Tensor, "M"]]
"""(keep, m, b) of the kernel from s to t and of the marginal at s: of one step, or of each position's own."""


class Foreseen:
    """Which positions a step of `Posterior` may change: MASK and token stand for what a position may be by now."""

    def __init__(self, process: Hybrid, free: Bool[Tensor, "B S"]):
        self.process, self.masked, self.token = process, free, torch.zeros_like(free)

    def places(self, state: Int[Tensor, "B S"], uniform: Float[Tensor, "B S numbers"], later: float,
               earlier: float) -> Bool[Tensor, "B S"]:
        return self.next(uniform, _step(self.process, later, earlier))

    def next(self, uniform: Float[Tensor, "B S 2"], step: Sequence[float]) -> Bool[Tensor, "B S"]:
        keep, to_mask, to_each, _, mask, each = step
        go, fresh = uniform.unbind(2)
        going = (self.masked & (go * (to_mask + keep * mask) < to_mask)) | (self.token & (go * (to_each + keep * each) < to_each))
        to_mask_again = going & (fresh >= 1 - mask)
        stays = to_mask_again & ~self.token
        self.masked = torch.where(going, to_mask_again, self.masked)
        self.token = self.token | (going & ~to_mask_again)
        return going & ~stays


class Changes:
    """The places that `Foreseen` names, as a plan wants them."""

    def __init__(self, foreseen: Foreseen, free: Bool[Tensor, "B S"], steps: list[list[float]], draws: Draws):
        self.foreseen, self.free, self.steps, self.draws = foreseen, free, steps, draws

    def under_way(self) -> Bool[Tensor, "B"]:
        return self.free.any(1)

    def falls(self, parts: Sequence[Segment]) -> Falls:
        uniform = self.draws.uniforms([f"token {part.step}" for part in parts], 2 * self.free.shape[1]).unflatten(2, (-1, 2))
        places = [self.foreseen.next(numbers, self.steps[part.step]) for part, numbers in zip(parts, uniform)]
        row, segment, column = torch.stack(places, 1).nonzero(as_tuple=True)
        return Falls(row, segment, torch.zeros_like(row), column, torch.ones_like(row, dtype=torch.bool),
                     uniform[segment, row, column])


def _step(process: Hybrid, later: float, earlier: float) -> list[float]:
    return _steps(process, [later, earlier])[0].tolist()


def _steps(process: Hybrid, grid: Sequence[float]) -> Float[Tensor, "steps 6"]:
    times = torch.tensor(grid, dtype=torch.float64)
    return torch.stack([*process.between(times[1:], times[:-1]), *process.at(times[1:])], 1)


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
    fixed = fixed_tokens(shape, prefix, given, tree.size, torch.device("cpu"))
    walk = _Walk(model, rule, tree, fixed, at_home(draws))
    total, told = len(grid) - 1 + rounds, progress or (lambda done, total: None)
    film = Film(walk.frame, grid, trace)
    with autocast(walk.state.device, dtype):
        if model.told_time and isinstance(rule, Posterior) and isinstance(walk.plan, Foreseen):
            _each_by_itself(walk, rule, walk.plan, grid, choice, film, lambda done: told(done, total))
        else:
            for number, (later, earlier) in enumerate(zip(grid, grid[1:])):
                film.begins(number)
                walk.step(later, earlier, choice, number)
                told(number + 1, total)
        film.ends()
        if correction is not None:
            _correct(walk, correction, choice, rounds)
            if trace:
                film.frames.append(walk.frame(0.0))
            told(total, total)
    return Sampled(walk.state, walk.evaluations, walk.calls, total, film.frames)


def _each_by_itself(walk: _Walk, rule: Posterior, foreseen: Foreseen, grid: Sequence[float], choice: Choice, film: Film,
                    told: Callable[[int], None]) -> None:
    """What may change is known beforehand: no sequence waits for another (`plan.py`)."""
    table, state = _steps(rule.process, grid), walk.state.view(-1)
    steps, source = walk.sent(table), Changes(foreseen, walk.free, table.tolist(), walk.draws)
    for turn in Rounds(source, segments(Cascade(), grid, 1), (len(walk.state), walk.state.shape[1]), walk.device):
        film.begins(turn.first)
        nodes = walk.state if len(turn.rows) == len(walk.state) else walk.state[turn.asked]
        hidden = walk.network.hidden(nodes, turn.time, None, turn.columns).flatten(0, 1)
        walk.evaluations[turn.rows] += 1
        walk.calls += 1

        def drawn(part: slice, hidden: Tensor = hidden, turn: Round = turn) -> Tensor:
            here, step = state[turn.place[part]], steps[turn.part[part]].unbind(1)
            return rule.drawn(walk.model.head, hidden[turn.local[part]], here, turn.chance[part], step, choice)

        state[turn.place] = in_parts(drawn, len(turn.place), walk.size)
        told(turn.step)
    told(len(grid) - 1)


class _Walk:
    """The state of a batch, on the device, and the hidden states that were computed from it."""

    def __init__(self, model: Network, rule: Rule, tree: Tree, fixed: Int[Tensor, "B S"], draws: Draws):
        self.model, self.rule, self.size, self.draws = model, rule, tree.size, draws
        self.device, self.network = tree.ancestor.device, Replay(model, len(fixed))
        self.free = fixed < 0
        self.state = self.sent(torch.where(self.free, rule.start(draws.uniform("start", fixed.shape[1])), fixed))
        self.plan = rule.plan(self.free)
        self.evaluations = torch.zeros(len(fixed), dtype=torch.int64)
        self.known = torch.zeros(len(fixed), dtype=torch.bool)
        """Rows whose hidden states are those of their present state (for a network that is not told the time)."""
        self.kept: Tensor | None = None
        self.calls = 0

    def sent(self, values: Tensor) -> Tensor:
        return sent(values, self.device)

    def look(self, rows: Int[Tensor, "rows"], time: float) -> None:
        """Hidden states of some rows (`kept`), computed where they are not known."""
        asked = rows if self.model.told_time else rows[~self.known[rows]]
        if len(asked):
            at, when = self.sent(asked), torch.full((len(asked),), time, dtype=torch.float64, device=self.device)
            fresh = self.network.hidden(self.state[at], when, None)
            self.evaluations[asked] += 1
            self.calls += 1
            if self.kept is None:
                self.kept = fresh.new_empty(len(self.state), *fresh.shape[1:])
            self.kept[at], self.known[asked] = fresh, True

    def ask(self, places: Bool[Tensor, "B S"], time: float, act: Callable[..., Tensor],
            uniform: Float[Tensor, "B S *numbers"]) -> tuple[Int[Tensor, "M"], Tensor]:
        """(flat places, act(hidden, state, uniform) of those positions), a few at a time."""
        self.look(places.any(1).nonzero()[:, 0], time)
        assert self.kept is not None, "rows that are known were computed once"
        at = self.sent(places.flatten().nonzero()[:, 0])
        hidden, state, mine = self.kept.flatten(0, 1), self.state.view(-1), self.sent(uniform[places])
        return at, in_parts(lambda part: act(hidden[at[part]], state[at[part]], mine[part]), len(at), self.size)

    def step(self, later: float, earlier: float, choice: Choice, number: int) -> bool:
        """One step down; whether anything may have changed."""
        rule, length = self.rule, self.state.shape[1]
        uniform = self.draws.uniform(f"token {number}", length, rule.numbers)
        places = self.plan.places(self.state, uniform, later, earlier)
        if not bool(places.any()):
            return False

        def act(hidden: Tensor, state: Tensor, mine: Tensor) -> Tensor:
            return rule.outcome(self.model.head, hidden, state, mine, later, earlier, choice)

        self.put(*self.ask(places, later, act, uniform))
        return True

    def put(self, at: Int[Tensor, "M"], token: Int[Tensor, "M"]) -> None:
        if not self.model.told_time:  # what has changed is worth waiting for: the rest need not be evaluated again
            changed = at[self.state.view(-1)[at] != token].cpu()
            self.known[changed // self.state.shape[1]] = False
        self.state.view(-1)[at] = token

    def frame(self, time: float) -> Frame:
        state = self.state[0]
        return Frame(time, int(self.evaluations[0]), (state == self.size).long().tolist(), state.tolist())


def _correct(walk: _Walk, correction: Correction, choice: Choice, rounds: int) -> None:
    """Self-correction of finished texts: one token a round, until nothing wants to change or nothing gets better."""
    choice = replace(choice, temperature=correction.temperature)
    root, free, (B, S) = walk.size, walk.sent(walk.free), walk.state.shape
    best, count = torch.zeros(B, dtype=torch.float64), walk.free.sum(1)
    waited, going = torch.zeros_like(count), count > 0

    def act(hidden: Tensor, state: Tensor, uniform: Tensor) -> Tensor:
        """What is proposed, how probable it is if it differs, and the most probable token."""
        p = choice.probabilities(walk.model.head.log_probs(hidden, torch.full_like(state, root)))
        token = invert(p, uniform)
        return torch.stack([token, p.gather(1, token[:, None])[:, 0] * (token != state), p.argmax(1)], 1)

    for number in range(rounds):
        if not bool(going.any()):
            return
        at, drawn = walk.ask(walk.free & going[:, None], correction.time, act, walk.draws.uniform(f"correct {number}", S))
        empty = torch.zeros(B * S, dtype=torch.float64, device=walk.device)
        token, score, likeliest = (empty.index_copy(0, at, column).view(B, S) for column in drawn.double().unbind(1))
        score, column = score.max(1)
        token, row = token.long(), torch.arange(B, device=walk.device)
        text = walk.state.clone()
        text[row, column] = torch.where(score > 0, token[row, column], text[row, column])
        agreed = ((text == likeliest) & free).sum(1).cpu().double() / count.clamp(min=1)
        waited = torch.where(agreed > best, 0, waited + 1)
        best = torch.maximum(best, agreed)
        going = going & (score > 0).cpu() & (waited <= correction.patience)
        if bool(going.any()):
            chosen = walk.sent(going.nonzero()[:, 0])
            walk.put(chosen * S + column[chosen], text[chosen, column[chosen]])
