"""Samplers of GIDD and SEDD against the law that the oracle follows exactly, step by step."""
from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.errors import SampleError
from tdlm.objectives import GiddMethod, SeddMethod
from tdlm.process.flat import Hybrid, Uniform
from tdlm.process.flat_oracle import FlatWorld
from tdlm.rng import Draws
from tdlm.sample import Choice
from tdlm.sample import draw as draw_module
from tdlm.sample.flat import Correction
from tdlm.sample.score import AbsorbScore, UniformScore
from tests.flat_worlds import RawHead, Table, arbitrary, objective, ratios_from, softmax, to_raw, within_five_sigma
from tests.worlds import distribution

FLOAT = torch.float64
SIZE, LENGTH, ROWS = 3, 2, 6000


def draw(method, predict, steps: int, told_time: bool = False, rows: int = ROWS, **options):
    target = objective(method, SIZE)
    drawn = target.sample(Table(predict, told_time), (rows, options.pop("length", LENGTH)), steps=steps,
                          draws=Draws(11, 0, "law", torch.arange(rows)), **options)
    assert int(drawn.tokens.max()) < SIZE and drawn.tokens.dtype == torch.int64
    return drawn


def agrees(drawn, law: dict[tuple[int, ...], float]) -> bool:
    p = torch.zeros((SIZE + 1,) * LENGTH, dtype=FLOAT)
    for state, mass in law.items():
        p[state] += mass
    assert float(p.sum()) == pytest.approx(1, abs=1e-9) and float(p[:SIZE, :SIZE].sum()) == pytest.approx(1, abs=1e-9)
    code = (drawn.tokens * torch.tensor([SIZE, 1])).sum(1)
    return within_five_sigma(torch.bincount(code, minlength=SIZE**2), p[:SIZE, :SIZE].flatten())


def world_of(method, seed: int = 4) -> FlatWorld:
    return FlatWorld(objective(method, SIZE).process, distribution(SIZE, LENGTH, seed))


ALL_MASKED = {(SIZE,) * LENGTH: 1.0}
ANY_TOKENS = dict.fromkeys(itertools.product(range(SIZE), repeat=LENGTH), 1 / SIZE**LENGTH)


@pytest.mark.parametrize("p_uniform", [0.0, 0.3])
@pytest.mark.parametrize("times", [None, [1.0, 0.9, 0.2, 0.0], [1.0, 0.0]])
def test_gidd_follows_the_enumerated_law(p_uniform, times):
    method, predict = GiddMethod(p_uniform=p_uniform), arbitrary(SIZE, 7)
    world = world_of(method)
    grid = times or [1.0, 0.75, 0.5, 0.25, 0.0]
    law = world.law(grid, ALL_MASKED, world.bayes_rows(softmax(predict)))
    assert agrees(draw(method, predict, 4, times=times), law)


@pytest.mark.parametrize("sampler", ["analytic", "euler"])
@pytest.mark.parametrize("graph", ["absorb", "uniform"])
def test_sedd_follows_the_enumerated_law(graph, sampler):
    """Scores of no distribution: some rows have negative entries, which are clipped alike. The last step is analytic."""
    method, some = SeddMethod(graph=graph), arbitrary(SIZE, 7)
    world, grid = world_of(method), [1.0, 0.75, 0.5, 0.25, 0.0]

    def predict(state: tuple[int, ...], t: float) -> Tensor:
        return some(state, t) + 1

    ratios = ratios_from(world.process, predict)
    analytic, euler = world.analytic_rows(ratios), world.euler_rows(ratios)
    negative = []

    def rows(state: tuple[int, ...], later: float, earlier: float) -> Tensor:
        later = min(later, 1 - 1e-9)  # on the absorbing graph the kernel from t = 1 has no inverse
        if earlier == 0:
            p = analytic(state, later, earlier)
            return torch.cat([p[:, :SIZE].clamp(min=0), torch.zeros(LENGTH, 1, dtype=FLOAT)], 1)  # no MASK at the end
        p = (euler if sampler == "euler" else analytic)(state, later, earlier)
        negative.append(bool((p < -1e-9).any()))
        return p

    start = ALL_MASKED if graph == "absorb" else ANY_TOKENS
    assert agrees(draw(method, predict, 4, sampler=sampler), world.law(grid, start, rows))
    assert any(negative), "the clipping is tried too"


def test_more_steps_come_closer_to_the_data():
    for method in (GiddMethod(p_uniform=0.2), SeddMethod(graph="uniform")):
        world, gaps = world_of(method), []
        for steps in (2, 8, 32):
            grid = [1 - k / steps for k in range(steps)] + [0.0]
            if isinstance(method, GiddMethod):
                start, rows = ALL_MASKED, world.bayes_rows(world.leave_one_out)
            else:
                start, rows = ANY_TOKENS, world.analytic_rows(ratios_from(world.process, to_raw(world)))
            law = world.law(grid, start, rows)
            gaps.append(sum(abs(law.get(x, 0.0) - float(world.joint[x])) for x in world.sequences))
        assert gaps[0] > 1.5 * gaps[1] > 2 * gaps[2]


@pytest.mark.parametrize("p_uniform", [0.0, 0.3])
def test_self_correction_follows_its_law(p_uniform):
    """One step down, then one round: proposals at its own temperature, the most probable one that differs is put in."""
    method, predict = GiddMethod(p_uniform=p_uniform), arbitrary(SIZE, 7)
    world, temperature = world_of(method), 0.7
    law: dict[tuple[int, ...], float] = {}
    for text, mass in world.law([1.0, 0.0], ALL_MASKED, world.bayes_rows(softmax(predict))).items():
        p = (predict(text, 0.01) / temperature).softmax(-1)
        for proposal in itertools.product(range(SIZE), repeat=LENGTH):
            share = mass * math.prod(float(p[i, token]) for i, token in enumerate(proposal))
            score = [float(p[i, token]) * (token != text[i]) for i, token in enumerate(proposal)]
            place = max(range(LENGTH), key=lambda i: score[i])
            after = tuple(proposal[i] if i == place else text[i] for i in range(LENGTH))
            law[after] = law.get(after, 0.0) + share
    drawn = draw(method, predict, 2, sampler="self-correction", correction=Correction(temperature=temperature))
    assert drawn.steps == 2 and int(drawn.evaluations.max()) == 2
    assert agrees(drawn, law)


def rounds_of(predict, steps: int, told_time: bool) -> tuple[Tensor, Tensor]:
    """The tokens, and how often each of 8 sequences was asked about in self-correction."""
    model = Listening(predict, told_time)
    drawn = objective(GiddMethod(), SIZE).sample(model, (8, 5), steps=steps, draws=Draws(11, 0, "law", torch.arange(8)),
                                                 sampler="self-correction")
    assert int(drawn.evaluations.sum()) == len(model.times)
    return drawn.tokens, torch.tensor(model.times).eq(Correction.time).sum() / 8


class Listening(Table):
    """Remembers the time of each sequence it was asked about."""

    def __init__(self, predict, told_time: bool):
        super().__init__(predict, told_time)
        self.times: list[float] = []

    def hidden(self, nodes, time, level):
        self.times.extend(time.tolist())
        return super().hidden(nodes, time, level)


def test_self_correction_stops():
    """A text that the network agrees with is left alone; one that never gets better is given up after the patience."""
    right = torch.tensor([[30.0, 0, 0]], dtype=FLOAT)
    for told_time in (False, True):
        tokens, rounds = rounds_of(lambda state, t: right.expand(len(state), -1), 100, told_time)
        assert (tokens == 0).all() and (rounds == 1 if told_time else rounds <= 1)
    _, rounds = rounds_of(lambda state, t: torch.tensor([[0.0, 20.0, 0.0] if z == 0 else [20.0, 0.0, 0.0] for z in state],
                                                        dtype=FLOAT), 400, True)
    assert 30 < rounds < 60


def test_given_tokens_never_change():
    given = torch.tensor([[-1, 2, -1, 0]]).expand(40, -1)
    for method in (GiddMethod(p_uniform=0.3), GiddMethod(p_uniform=0.0), SeddMethod(), SeddMethod(graph="uniform")):
        for sampler in objective(method, SIZE).samplers:
            seen: set[tuple[int, ...]] = set()

            def predict(state, t, seen=seen):
                seen.add((state[1], state[3]))
                return arbitrary(SIZE, 1)(state, t)

            drawn = draw(method, predict, 8, rows=40, length=4, given=given, shown=given >= 0, sampler=sampler)
            assert drawn.tokens[:, 1].eq(2).all() and drawn.tokens[:, 3].eq(0).all()
            assert seen == {(2, 0)}, "given tokens are always in sight"
            assert len(set(map(tuple, drawn.tokens[:, ::2].tolist()))) > 3
            mixed = given.clone()
            mixed[::2] = 1
            alike = draw(method, predict, 8, rows=40, length=4, given=mixed, sampler=sampler)
            assert torch.equal(alike.tokens[1::2], drawn.tokens[1::2]), "a finished neighbour changes nothing"
            whole = draw(method, predict, 8, rows=2, length=4, given=torch.ones(2, 4, dtype=torch.int64), sampler=sampler)
            assert whole.calls == 0 and (whole.evaluations == 0).all() and (whole.tokens == 1).all()


def test_evaluations_are_saved_when_nothing_changed():
    """A network that is told the time is asked in every step that may change something: all of them for SEDD, for GIDD those
    that are seen to in advance. One that is not told is asked once for each state that was looked at."""
    told = draw(SeddMethod(graph="uniform"), arbitrary(SIZE, 1), 60, told_time=True, rows=6)
    assert (told.evaluations == 60).all() and told.calls == 60 and told.steps == 60
    told = draw(GiddMethod(p_uniform=0.3), arbitrary(SIZE, 1), 60, told_time=True, rows=6)
    assert (told.evaluations < 30).all() and (told.evaluations >= 1).all() and told.steps == 60
    for method in (GiddMethod(p_uniform=0.0), SeddMethod()):
        told = draw(method, lambda state, t: torch.zeros(len(state), SIZE, dtype=FLOAT), 60, told_time=True, rows=6)
        assert (told.evaluations <= 60).all()
        free = draw(method, lambda state, t: torch.zeros(len(state), SIZE, dtype=FLOAT), 60, rows=6)
        assert (free.evaluations <= LENGTH).all(), "each position changes once"
        assert torch.equal(free.tokens, told.tokens), "what is kept says the same"
    model = Table(arbitrary(SIZE, 1), told_time=False)
    drawn = objective(GiddMethod(p_uniform=0.3), SIZE).sample(model, (6, LENGTH), steps=60,
                                                              draws=Draws(11, 0, "law", torch.arange(6)))
    assert model.seen == int(drawn.evaluations.sum()) <= int(told.evaluations.sum())


def test_large_tables_are_drawn_in_parts(monkeypatch):
    for method in (GiddMethod(p_uniform=0.3), SeddMethod(graph="uniform")):
        whole = draw(method, arbitrary(SIZE, 1), 5, rows=20)
        monkeypatch.setattr(draw_module, "LIMIT", 4 * SIZE)
        assert torch.equal(draw(method, arbitrary(SIZE, 1), 5, rows=20).tokens, whole.tokens)
        monkeypatch.undo()


@pytest.mark.parametrize("rule", [AbsorbScore(Hybrid(4)), UniformScore(Uniform(4)), UniformScore(Uniform(4), True)], ids=str)
def test_choices_say_where_scores_go_not_whether(rule):
    """Under temperature and top-p a position stays as often as without; where it goes follows the row without itself."""
    raw = torch.tensor([[0.1, 1.0, 0.5, -1.0]], dtype=FLOAT).expand(2, -1)
    state = torch.tensor([4, 4]) if isinstance(rule, AbsorbScore) else torch.tensor([1, 2])
    plain, cold, best = (rule.rows(RawHead(), raw, state, 0.6, 0.5, choice)
                         for choice in (Choice(), Choice(temperature=0.5), Choice(temperature=0.0)))
    for row, here in enumerate(state.tolist()):
        away = [v for v in range(plain.shape[1]) if v != here]
        for other in (cold, best):
            assert float(other[row, here]) == pytest.approx(float(plain[row, here]), abs=1e-12)
        go = plain[row, away]
        assert torch.allclose(cold[row, away], go.sum() * go**2 / (go**2).sum())
        assert torch.allclose(best[row, away], go.sum() * (go == go.max()))


def test_temperature_zero_takes_the_first_choice():
    always = torch.tensor([[0.0, 1.0, 0.5]], dtype=FLOAT)
    for method in (GiddMethod(p_uniform=0.0), SeddMethod()):
        drawn = draw(method, lambda state, t: always.expand(len(state), -1), 6, rows=50, choice=Choice(temperature=0.0))
        assert (drawn.tokens == 1).all()


def test_a_trace_and_what_cannot_be_asked():
    drawn = draw(GiddMethod(p_uniform=0.3), arbitrary(SIZE, 1), 6, rows=3, trace=True)
    assert drawn.frames[0].heights == [1] * LENGTH and drawn.frames[-1].heights == [0] * LENGTH
    assert drawn.frames[-1].nodes == drawn.tokens[0].tolist() and drawn.frames[0].time == 1.0
    calls: list[tuple[int, int]] = []
    draw(SeddMethod(), arbitrary(SIZE, 1), 5, rows=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(k + 1, 5) for k in range(5)]
    draw(SeddMethod(), arbitrary(SIZE, 1), 5, rows=3, per_level=[4])
    options: dict[str, Any]
    for options, message in (({"per_level": [2, 2]}, "levels"), ({"times": [0.5, 0.0]}, "grid"), ({"sampler": "eulre"}, "euler"),
                             ({"prefix": torch.zeros(9, dtype=torch.int64)}, "prompt")):
        with pytest.raises(SampleError, match=message):
            draw(SeddMethod(), arbitrary(SIZE, 1), 5, rows=3, **options)
    with pytest.raises(SampleError, match="steps"):
        draw(GiddMethod(), arbitrary(SIZE, 1), 0, rows=3)
