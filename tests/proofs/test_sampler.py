"""Samplers against the law that the oracle follows exactly, step by step."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.process import Cascade, Cosine, Overlapping
from tdlm.process.oracle import Enumeration
from tdlm.rng import Draws
from tdlm.sample import generate
from tdlm.sample.draw import Choice, invert
from tdlm.sample.grid import times_for
from tdlm.tree import Tree
from tests.worlds import TableModel, distribution, processes, random_predictor, tiny_world, trees

FLOAT = torch.float64


def frequencies(tokens: torch.Tensor, size: int) -> torch.Tensor:
    code = (tokens * size ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
    return torch.bincount(code, minlength=size ** tokens.shape[1]).double()


def within_five_sigma(count: torch.Tensor, p: torch.Tensor) -> bool:
    n = count.sum()
    return bool(((count - n * p).abs() <= 5 * torch.sqrt(n * p * (1 - p)) + 1e-6).all())


def law_vector(law: dict, size: int, length: int) -> torch.Tensor:
    p = torch.zeros((size,) * length, dtype=FLOAT)
    for nodes, mass in law.items():
        p[nodes] += mass
    return p.flatten()


@settings(max_examples=20)
@given(trees(max_leaves=6), processes(), st.integers(0, 1000), st.integers(0, 4))
def test_one_position_is_sampled_exactly_on_any_grid(tree, process, seed, extra):
    """S = 1 with the exact denoiser: the law is p(x) whatever the steps."""
    enumeration = Enumeration(tree, distribution(tree.size, 1, seed))
    grid = times_for(process, tree.height, tree.height + extra)
    law = law_vector(enumeration.law(process, grid, enumeration.exact), tree.size, 1)
    assert (law - enumeration.joint).abs().max() < 1e-12


@pytest.mark.parametrize("process", [Cascade(), Cascade(Cosine()), Overlapping()])
@pytest.mark.parametrize("times", [None, [1.0, 0.8, 0.35, 0.0], [1.0, 0.0]])
def test_the_sampler_follows_the_enumerated_law(process, times):
    """Two dependent positions, an arbitrary network, grids that cross level thresholds: frequencies within 5 sigma."""
    tree, enumeration = tiny_world(nested=[[0, 1], [2, [3, 4]]])
    predict = random_predictor(tree, 7)
    grid = times_for(process, tree.height, 4, None, times)
    law = law_vector(enumeration.law(process, grid, predict), tree.size, 2)
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    rows = 6000
    drawn = generate(CachedTable(tree, predict), process, tree, (rows, 2), steps=4, times=times,
                     draws=Draws(5, 0, "law", torch.arange(rows)))
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), law)


class CachedTable(TableModel):
    """Each distinct noisy sequence is looked up once."""

    def __init__(self, tree, predict):
        super().__init__(tree, predict)
        self.cache: dict = {}

    def hidden(self, nodes, time, level):
        for row in nodes.tolist():
            if tuple(row) not in self.cache:
                self.cache[tuple(row)] = self.predict(tuple(row), 0.5).clamp(min=1e-300).log()
        return torch.stack([self.cache[tuple(row)] for row in nodes.tolist()])


@pytest.mark.parametrize("process", [Cascade(), Overlapping()])
def test_many_steps_approach_the_data(process):
    tree, enumeration = tiny_world(seed=4)
    gaps = []
    for steps in (3, 12, 48):
        law = law_vector(enumeration.law(process, times_for(process, tree.height, steps), enumeration.exact), tree.size, 2)
        gaps.append(float((law - enumeration.joint.flatten()).abs().sum()))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]


@pytest.mark.parametrize("steps", [3, 5])
def test_the_n_step_bound_holds_for_the_n_step_sampler(steps):
    """NELBO_T(x) >= -log p_{model,T}(x) and E_x NELBO_T >= H(X); one x may lie below -log p(x)."""
    tree, enumeration = tiny_world(seed=2)
    process = Cascade()
    grid = times_for(process, tree.height, steps)
    law = law_vector(enumeration.law(process, grid, enumeration.exact), tree.size, 2).view(5, 5)
    mean = 0.0
    for x in enumeration.sequences:
        total = 0.0
        for later, earlier in zip(grid, grid[1:]):
            kernel = process.reverse(later, earlier, tree.height)
            w = process.occupancy(torch.tensor(math.nextafter(later, 0.0), dtype=FLOAT), tree.height)
            for heights in enumeration.patterns:
                chance = float(w[list(heights)].prod())
                if chance < 1e-12:
                    continue
                p = enumeration.exact(enumeration.nodes(x, heights))
                for i, h in enumerate(heights):
                    if h and float(kernel[h, h - 1]) > 0:
                        total -= chance * float(kernel[h, h - 1]) * math.log(float(p[i, int(tree.slot[h - 1, x[i]])]))
        assert total >= -math.log(float(law[x])) - 1e-9
        mean += float(enumeration.joint[x]) * total
    assert mean >= -float((enumeration.joint * enumeration.joint.log()).sum()) - 1e-9


def test_n_steps_are_n_evaluations_or_fewer():
    tree, _ = tiny_world()
    predict = random_predictor(tree, 1)
    for process in (Cascade(), Overlapping()):
        for steps in (3, 7, 40):
            drawn = generate(TableModel(tree, predict), process, tree, (8, 2), steps=steps,
                             draws=Draws(1, 0, "n", torch.arange(8)))
            most = steps if isinstance(process, Cascade) else steps + tree.height * 2
            assert int(drawn.evaluations.max()) <= most and drawn.steps == steps
    crossing = generate(TableModel(tree, predict), Cascade(), tree, (4, 2), steps=1, times=[1.0, 0.0],
                        draws=Draws(1, 0, "n", torch.arange(4)))
    assert int(crossing.evaluations.max()) == tree.height, "one step across m thresholds costs m + 1 evaluations"


def test_a_sample_does_not_depend_on_its_batch():
    tree, _ = tiny_world()
    predict = random_predictor(tree, 1)
    for process in (Cascade(), Overlapping()):
        together = generate(CachedTable(tree, predict), process, tree, (6, 2), steps=5, draws=Draws(9, 0, "s", torch.arange(6)))
        alone = generate(CachedTable(tree, predict), process, tree, (1, 2), steps=5, draws=Draws(9, 0, "s", torch.tensor([4])))
        assert torch.equal(together.tokens[4], alone.tokens[0])
        assert int(together.evaluations[4]) == int(alone.evaluations[0])


def test_given_tokens_stay_and_are_seen_as_their_ancestors():
    tree, _ = tiny_world()
    seen: list[tuple[int, ...]] = []

    def predict(nodes, t):
        seen.append(nodes)
        return random_predictor(tree, 1)(nodes, t)

    given = torch.tensor([[-1, 3, -1]]).expand(16, -1)
    drawn = generate(TableModel(tree, predict), Cascade(), tree, (16, 3), steps=9, given=given,
                     draws=Draws(1, 0, "g", torch.arange(16)))
    assert (drawn.tokens[:, 1] == 3).all()
    assert {row[1] for row in seen} == set(tree.ancestor[:tree.height, 3].tolist())
    prefix = generate(TableModel(tree, predict), Overlapping(), tree, (16, 3), steps=9, prefix=torch.tensor([4, 0]),
                      draws=Draws(1, 0, "g", torch.arange(16)))
    assert (prefix.tokens[:, :2] == torch.tensor([4, 0])).all()
    hidden = generate(TableModel(tree, predict), Cascade(), tree, (2, 3), steps=9, given=given[:2], shown=given[:2] >= 0,
                      draws=Draws(1, 0, "g", torch.arange(2)))
    assert (hidden.tokens[:, 1] == 3).all()


def test_conditional_sampling_of_one_gap_is_exact():
    """One missing position beside a given one: frequencies are p(x_1 | x_2) for the exact denoiser, at every level."""
    tree, enumeration = tiny_world(nested=[[0, 1], [2, 3, 4]])
    rows = 8000
    given = torch.tensor([[-1, 3]]).expand(rows, -1)
    drawn = generate(CachedTable(tree, enumeration.exact), Overlapping(), tree, (rows, 2), steps=4, given=given,
                     draws=Draws(2, 0, "c", torch.arange(rows)))
    p = enumeration.joint[:, 3] / enumeration.joint[:, 3].sum()
    assert within_five_sigma(torch.bincount(drawn.tokens[:, 0], minlength=5).double(), p)


def test_choices():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=FLOAT)
    assert torch.allclose(Choice().probabilities(p.log()), p)
    assert Choice(temperature=0.0).probabilities(p.log()).tolist() == [[1, 0, 0, 0]]
    cold = Choice(temperature=0.5).probabilities(p.log())
    assert torch.allclose(cold, p**2 / (p**2).sum())
    assert torch.allclose(Choice(top_p=0.75).probabilities(p.log()), torch.tensor([[0.625, 0.375, 0, 0]], dtype=FLOAT))
    assert torch.allclose(Choice(top_p=0.5).probabilities(p.log()), torch.tensor([[1.0, 0, 0, 0]], dtype=FLOAT))
    assert torch.allclose(Choice(min_p=0.2).probabilities(p.log()), torch.tensor([[10 / 19, 6 / 19, 3 / 19, 0]], dtype=FLOAT))
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"temperature": math.nan}):
        with pytest.raises(Exception, match="must"):
            Choice(**bad)


def test_inversion_never_picks_an_impossible_child():
    p = torch.tensor([[0.0, 1.0, 0.0], [0.3, 0.0, 0.7]], dtype=FLOAT)
    for u in (2**-54, 0.3, 1 - 2**-54):
        slot = invert(p, torch.tensor([u, u], dtype=FLOAT))
        assert bool((p.gather(1, slot[:, None]) > 0).all())


def test_float64_draws_are_not_a_temperature():
    """Rare children come as often as they should (float32 Gumbel draws would lose them)."""
    p = torch.full((1, 500), 1e-5, dtype=FLOAT)
    p[0, 0] = 1 - 499e-5
    u = Draws(0, 0, "u", torch.arange(50_000)).uniform("x")
    slot = invert(p.expand(50_000, -1), u)
    rare = int((slot > 0).sum())
    assert abs(rare - 50_000 * 499e-5) < 5 * math.sqrt(50_000 * 499e-5)


def test_a_tree_with_padded_paths_ends_in_tokens():
    tree = Tree.from_nested([0, [1, [2, 3]]])
    drawn = generate(TableModel(tree, random_predictor(tree)), Cascade(), tree, (32, 4), steps=6, trace=True,
                     draws=Draws(0, 0, "p", torch.arange(32)))
    assert int(drawn.tokens.max()) < 4
    assert drawn.frames[0].heights == [3] * 4 and drawn.frames[-1].heights == [0] * 4
    assert drawn.frames[-1].nodes == drawn.tokens[0].tolist()
    heights = [sum(frame.heights) for frame in drawn.frames]
    assert heights == sorted(heights, reverse=True)
