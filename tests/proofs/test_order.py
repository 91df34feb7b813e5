"""First-hitting and confidence samplers: the times of jumps, the law of the order process by enumeration, and the counting."""
from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import SampleError
from tdlm.objectives import TreeMethod
from tdlm.process import Cascade, Cosine, Overlapping, Polynomial
from tdlm.process.oracle import Enumeration, alpha, legendre
from tdlm.rng import Draws
from tdlm.sample import Choice, Sampled, confidence, first_hitting
from tdlm.sample.grid import times_for
from tdlm.tree import Tree
from tests.proofs.test_sampler import CachedTable, frequencies, law_vector, within_five_sigma
from tests.worlds import TableModel, distribution, processes, random_predictor, tiny_world

FLOAT = torch.float64
STAR, TWO, THREE = [0, 1, 2], [[0, 1], [2, [3]]], [[[0, 1], 2], [[3, 4]]]
PROCESSES = [Cascade(), Cascade(Cosine()), Overlapping()]


def rows(count: int, seed: int = 5) -> Draws:
    return Draws(seed, 0, "order", torch.arange(count))


def next_jumps(process, tree_height: int, heights: tuple[int, ...]) -> dict[int, float]:
    """Which position falls next, and how probable that is.

    Cascade: all that have not left the highest level yet are alike. Overlapping: forward in time all positions below the root
    climb at the same rate, so each is equally likely to climb next; this chain of heights is turned round by Bayes' rule.
    """
    if isinstance(process, Cascade):
        top = [i for i, h in enumerate(heights) if h == max(heights)]
        return {i: 1 / len(top) for i in top}
    before = {i: (*heights[:i], h - 1, *heights[i + 1:]) for i, h in enumerate(heights) if h}
    flow = {i: visited(tree_height, h) / sum(x < tree_height for x in h) for i, h in before.items()}
    return {i: share / sum(flow.values()) for i, share in flow.items()}


@functools.cache
def visited(tree_height: int, heights: tuple[int, ...]) -> float:
    """The probability that positions which climb one at a time, each as likely as the others, pass through these heights."""
    if not any(heights):
        return 1.0
    below = [(*heights[:i], h - 1, *heights[i + 1:]) for i, h in enumerate(heights) if h]
    return sum(visited(tree_height, h) / sum(x < tree_height for x in h) for h in below)


def order_law(enumeration: Enumeration, process, predict) -> torch.Tensor:
    """The law of tokens when positions fall one by one, by enumeration of all orders and all children."""
    tree, S = enumeration.tree, enumeration.length
    predict = functools.cache(predict)
    states = {((tree.height,) * S, (tree.root,) * S): 1.0}
    for _ in range(tree.height * S):
        after: dict = {}
        for (heights, nodes), mass in states.items():
            for i, chance in next_jumps(process, tree.height, heights).items():
                for height, child, q in enumeration._below_one(heights[i], nodes[i], predict(nodes)[i]):
                    key = (*heights[:i], height, *heights[i + 1:]), (*nodes[:i], child, *nodes[i + 1:])
                    after[key] = after.get(key, 0.0) + mass * chance * q
        states = after
    return law_vector({nodes: mass for (_, nodes), mass in states.items()}, tree.size, S)


def independent(drawn: Sampled) -> torch.Tensor:
    assert drawn.together is not None
    return drawn.together


def timeless(predict):
    return lambda nodes: predict(nodes, 0.5)


@pytest.mark.parametrize("process", [*PROCESSES, Cascade(Polynomial(3.0)), Cascade(thresholds=(0.2, 0.9))])
def test_jumps_come_when_the_occupancies_say(process):
    """Heights at one time follow the occupancies, and at two times the reverse kernel: within 5 sigma of 20,000 paths."""
    height, count = 3, 20_000
    clock, time = process.arrivals(rows(count).uniform("u", 1, height), height)
    assert bool((clock.diff(dim=-1) > 0).all()) and bool(((time > 0) & (time <= 1)).all())
    for t in (0.05, 0.3, 0.5, 0.7, 0.93):
        at = (time[:, 0] <= t).sum(1)
        w = process.occupancy(torch.tensor(t, dtype=FLOAT), height)
        assert within_five_sigma(torch.bincount(at, minlength=height + 1).double(), w), t
        earlier = t - 0.04
        both = (time[:, 0] <= earlier).sum(1) * (height + 1) + at
        kernel = torch.eye(height + 1, dtype=FLOAT)
        for high, low in process.segments(t, earlier, height):
            kernel = kernel @ process.reverse(high, low, height)
        joint = (w[:, None] * kernel).T.reshape(-1)
        assert within_five_sigma(torch.bincount(both, minlength=(height + 1) ** 2).double(), joint), t


@settings(max_examples=40)
@given(processes(), st.floats(1e-12, 1 - 1e-12))
def test_a_schedule_is_inverted(process, u):
    if isinstance(process, Cascade):
        value = torch.tensor(u, dtype=FLOAT)
        back = process.alpha.inverse(value)
        assert float(process.alpha.moved(back)) == pytest.approx(u, rel=1e-12)
        assert 1 - alpha(process.alpha, float(back)) == pytest.approx(u, abs=1e-12)


def test_the_clock_orders_jumps_where_t_has_rounded_to_one():
    clock, time = Overlapping().arrivals(rows(200).uniform("u", 4, 60), 60)
    late = clock[time == 1.0]
    assert len(late) > 1000 and len(late.unique()) == len(late)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("nested,length", [(STAR, 2), (STAR, 3), (TWO, 2), (TWO, 3), (THREE, 2)])
def test_exact_denoiser_gives_the_data_by_enumeration_and_by_sampling(process, nested, length):
    """The order process with the exact posterior has the law p(x) itself; the sampler's frequencies lie within 5 sigma."""
    tree, enumeration = tiny_world(nested=nested, length=length, seed=3)
    p = enumeration.joint.flatten()
    if length == 2:
        assert (order_law(enumeration, process, timeless(enumeration.exact)) - p).abs().max() < 1e-12
    drawn = first_hitting(CachedTable(tree, enumeration.exact), process, tree, (6000, length), steps=99, draws=rows(6000))
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), p)
    assert int(independent(drawn).max()) == 1 and int(drawn.evaluations.max()) <= tree.height * length


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("nested,length", [(STAR, 3), (TWO, 3), (THREE, 2)])
def test_any_network_gives_the_law_of_the_order_process(process, nested, length):
    tree, enumeration = tiny_world(nested=nested, length=length)
    predict = random_predictor(tree, 11)
    law = order_law(enumeration, process, timeless(predict))
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    drawn = first_hitting(CachedTable(tree, predict), process, tree, (8000, length), steps=99, draws=rows(8000))
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), law)


def told(tree: Tree):
    """A network that is told the time: the first child's probability swings with it."""
    def predict(nodes, t):
        kids = tree.num_children[torch.tensor(nodes)]
        p = torch.zeros(len(nodes), tree.branching, dtype=FLOAT)
        for i, (node, count) in enumerate(zip(nodes, kids.tolist())):
            first = 0.5 + 0.45 * math.cos(3 * t + node + i + sum(nodes))
            p[i, :count] = (1 - first) / max(count - 1, 1)
            p[i, 0] = first
        return p
    return predict


def test_the_network_is_told_the_time_of_the_jump_on_the_star():
    """Two positions, cosine schedule: both jump times integrated by quadrature over 1 - alpha, in which they are uniform."""
    tree, process, count = Tree.star(3), Cascade(Cosine()), 6000
    predict = told(tree)
    law = torch.zeros(3, 3, dtype=FLOAT)
    nodes, weights = legendre(12)
    times = {v: float(process.alpha.inverse(torch.tensor(v, dtype=FLOAT))) for v in nodes}
    for v, dv in zip(nodes, weights):
        for inner, share in zip(nodes, weights):
            later, earlier = times[v], float(process.alpha.inverse(torch.tensor(v * inner, dtype=FLOAT)))
            for first in (0, 1):
                begin = predict((tree.root, tree.root), later)[first]
                for x in range(3):
                    seen = (x, tree.root) if first == 0 else (tree.root, x)
                    rest = predict(seen, earlier)[1 - first] * begin[x] * dv * v * share
                    law[x] += rest if first == 0 else 0
                    law[:, x] += rest if first == 1 else 0
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    drawn = first_hitting(TableModel(tree, predict), process, tree, (count, 2), steps=2, draws=rows(count))
    assert within_five_sigma(frequencies(drawn.tokens, 3), law.flatten())


def test_the_network_is_told_the_time_of_the_jump_in_overlapping_levels():
    """One position, two jumps at s_2 > s_1 with density e^-s_2 on s_1 < s_2."""
    tree, count = Tree.from_nested([[0, 1], [2, 3]]), 6000
    predict, law = told(tree), torch.zeros(4, dtype=FLOAT)
    nodes, weights = legendre(10)
    panels = [(start + x, w) for start in range(30) for x, w in zip(nodes, weights)]
    for s, ds in panels:
        top = predict((tree.root,), -math.expm1(-s))[0]
        for inner, share in zip(nodes, weights):
            for cluster in (0, 1):
                below = predict((int(tree.children[-1, cluster]),), -math.expm1(-s * inner))[0]
                law[2 * cluster:2 * cluster + 2] += top[cluster] * below * ds * math.exp(-s) * s * share
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    drawn = first_hitting(TableModel(tree, predict), Overlapping(), tree, (count, 1), steps=2, draws=rows(count))
    assert within_five_sigma(frequencies(drawn.tokens, 4), law)


def test_time_and_level_belong_to_each_other():
    tree, asked = Tree.from_nested([[[0, 1], [2, 3]], [[4, 5], [6, 7]]]), []

    class Listening(TableModel):
        def hidden(self, nodes, time, level):
            assert level is not None
            asked.extend(zip(nodes.tolist(), time.tolist(), level.tolist()))
            return super().hidden(nodes, time, level)

    process, heights = Cascade(thresholds=(0.1, 0.5)), tree.node_height()
    for sampler in (first_hitting, confidence):
        asked.clear()
        sampler(Listening(tree, random_predictor(tree)), process, tree, (20, 3), steps=12, draws=rows(20))
        edges = process.edges(3)
        assert {level for _, _, level in asked} == {0, 1, 2}
        for nodes, time, level in asked:
            assert edges[level] <= time <= edges[level + 1]
            assert {int(heights[node]) for node in nodes} <= {level, level + 1}


@pytest.mark.parametrize("process", PROCESSES)
def test_many_steps_of_the_ancestral_sampler_approach_it(process):
    """For a network that is not told the time the two laws differ by O(1/N): 4 times the steps, a quarter of the gap."""
    tree, enumeration = tiny_world(nested=[[0, 1], [2, 3]])
    predict = functools.cache(random_predictor(tree, 2))
    exact = order_law(enumeration, process, timeless(predict))
    gaps = []
    for steps in (8, 32, 128):
        grid = times_for(process, tree.height, steps)
        law = enumeration.law(process, grid, lambda nodes, t: predict(nodes, 0.5))
        gaps.append(float((law_vector(law, tree.size, 2) - exact).abs().sum()))
    assert gaps[0] > 2.5 * gaps[1] > 6 * gaps[2] > 0 and gaps[2] < 0.02


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("sampler", [first_hitting, confidence])
def test_fewer_steps_than_jumps_are_grouped_and_kept_to(process, sampler):
    tree, length, count = Tree.from_nested([[[0, 1], [2, 3]], [[4, 5], [6, 7]]]), 8, 16
    model = TableModel(tree, random_predictor(tree, 1))
    for steps in (3, 4, 7, 11, 23, 24, 50):
        drawn = sampler(model, process, tree, (count, length), steps=steps, draws=rows(count))
        assert drawn.evaluations.tolist() == [min(steps, 3 * length)] * count
        assert drawn.calls == min(steps, 3 * length) and drawn.steps == steps
        assert bool((independent(drawn) == 1).all()) == (steps >= 3 * length)


def test_one_step_on_the_star_is_the_product_of_marginals():
    tree, enumeration = tiny_world(nested=STAR)
    first = enumeration.exact((tree.root, tree.root))
    drawn = first_hitting(CachedTable(tree, enumeration.exact), Cascade(), tree, (6000, 2), steps=1, draws=rows(6000))
    assert within_five_sigma(frequencies(drawn.tokens, 3), torch.outer(first[0], first[1]).flatten())
    assert independent(drawn).tolist() == [2] * 6000


def test_steps_are_shared_out_by_level():
    tree = Tree.from_nested([[0, 1], [2, 3]])
    model = TableModel(tree, random_predictor(tree, 1))
    for sampler in (first_hitting, confidence):
        drawn = sampler(model, Cascade(), tree, (4, 6), steps=8, per_level=[1, 6], draws=rows(4))
        assert drawn.evaluations.tolist() == [7] * 4 and independent(drawn).tolist() == [6] * 4 and drawn.steps == 7
        with pytest.raises(SampleError, match="at least 2"):
            sampler(model, Cascade(), tree, (4, 6), steps=1, draws=rows(4))
        with pytest.raises(SampleError, match="2 levels"):
            sampler(model, Cascade(), tree, (4, 6), steps=8, per_level=[1, 1, 1], draws=rows(4))
        with pytest.raises(SampleError, match="grid of times"):
            sampler(model, Cascade(), tree, (4, 6), steps=8, times=[1.0, 0.0], draws=rows(4))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("sampler", [first_hitting, confidence])
def test_free_jumps_cost_nothing_and_a_sample_does_not_depend_on_its_batch(process, sampler):
    """Padded paths and single children; rows of one batch need different numbers of evaluations."""
    tree = Tree.from_nested([0, [1, [2, 3]], [[[4]]]])
    seen: list[tuple[int, ...]] = []
    predict = random_predictor(tree, 4)

    def listen(nodes, t):
        seen.append(nodes)
        return predict(nodes, t)

    drawn = sampler(TableModel(tree, listen), process, tree, (64, 5), steps=20, draws=rows(64))
    choices = torch.tensor([sum(int(tree.num_children[tree.ancestor[h, x]]) > 1 for h in range(1, 5)) for x in range(5)])
    assert torch.equal(drawn.evaluations, choices[drawn.tokens].sum(1)), "one evaluation for every real choice"
    assert len(drawn.evaluations.unique()) > 3 and len(seen) == int(drawn.evaluations.sum())
    for row in (0, 17, 40):
        alone = sampler(TableModel(tree, predict), process, tree, (1, 5), steps=20,
                        draws=Draws(5, 0, "order", torch.tensor([row])))
        assert torch.equal(alone.tokens[0], drawn.tokens[row])
        assert int(alone.evaluations[0]) == int(drawn.evaluations[row])


@pytest.mark.parametrize("process", PROCESSES)
def test_one_gap_beside_given_tokens_is_exact(process):
    """p(x_2 | x_1, x_3) from the overlapping process, where given tokens are seen as tokens; in the cascade they stay too."""
    tree, enumeration = tiny_world(nested=[[0, 1], [2, 3, 4]], length=3)
    count = 6000
    given_tokens = torch.tensor([[4, -1, 2]]).expand(count, -1)
    seen: set[int] = set()

    class Listening(CachedTable):
        def hidden(self, nodes, time, level):
            seen.update(nodes[:, 0].tolist())
            return super().hidden(nodes, time, level)

    drawn = first_hitting(Listening(tree, enumeration.exact), process, tree, (count, 3), steps=4, given=given_tokens,
                          draws=rows(count))
    assert bool((drawn.tokens[:, [0, 2]] == torch.tensor([4, 2])).all()) and int(drawn.evaluations.max()) == 2
    if isinstance(process, Cascade):
        assert seen == {4, int(tree.ancestor[1, 4])}
        return
    assert seen == {4}
    p = enumeration.joint[4, :, 2] / enumeration.joint[4, :, 2].sum()
    assert within_five_sigma(torch.bincount(drawn.tokens[:, 1], minlength=5).double(), p)


@pytest.mark.parametrize("sampler", [first_hitting, confidence])
def test_prompts_shown_tokens_and_traces(sampler):
    tree, _ = tiny_world()
    seen: list[tuple[int, ...]] = []
    predict = random_predictor(tree, 1)

    def listen(nodes, t):
        seen.append(nodes)
        return predict(nodes, t)

    prompt, pads = torch.tensor([4, 0]), torch.tensor([[-1, -1, -1, -1, 2]]).expand(8, -1)
    told_of = []
    drawn = sampler(TableModel(tree, listen), Cascade(), tree, (8, 5), steps=30, prefix=prompt, given=pads, shown=pads == 2,
                    draws=rows(8), trace=True, progress=lambda done, total: told_of.append((done, total)))
    assert bool((drawn.tokens[:, :2] == prompt).all()) and bool((drawn.tokens[:, 4] == 2).all())
    assert {row[4] for row in seen} == {2}, "a shown token is a token at all times"
    assert {row[0] for row in seen} == set(tree.ancestor[:3, 4].tolist())
    assert told_of[-1] == (6, 6)
    frames = drawn.frames
    assert frames[0].time == 1.0 and frames[-1].time == 0.0 and frames[-1].nodes == drawn.tokens[0].tolist()
    assert frames[0].heights[4] == 0 and frames[-1].heights == [0] * 5
    assert [frame.time for frame in frames] == sorted((frame.time for frame in frames), reverse=True)
    totals = [sum(frame.heights) for frame in frames]
    assert totals == sorted(totals, reverse=True)
    everything = sampler(TableModel(tree, predict), Cascade(), tree, (2, 2), steps=4, prefix=prompt, draws=rows(2))
    assert everything.tokens.tolist() == [[4, 0]] * 2 and everything.calls == 0


def steady(tree: Tree, best: list[float]):
    """Position i gives its first child the probability best[i], whatever is seen."""
    def predict(nodes, t):
        p = torch.zeros(len(nodes), tree.branching, dtype=FLOAT)
        for i, node in enumerate(nodes):
            count = int(tree.num_children[node])
            p[i, :count] = (1 - best[i]) / max(count - 1, 1)
            p[i, 0] = best[i]
        return p
    return predict


def order_of(frames) -> list[int]:
    """Which position fell, frame by frame."""
    return [next(i for i, (a, b) in enumerate(zip(one.heights, two.heights)) if a != b)
            for one, two in itertools.pairwise(frames) if one.heights != two.heights]


@pytest.mark.parametrize("choice", [Choice(), Choice(temperature=0.0), Choice(top_p=0.3)])
def test_the_most_certain_fall_first(choice):
    """Also where `Choice` leaves one child each (probability 1): the network's own probabilities then decide."""
    tree = Tree.from_nested([[0, 1], [2, 3]])
    model = TableModel(tree, steady(tree, [0.6, 0.9, 0.75, 0.9 + 1e-6]))  # rounding does not decide
    drawn = confidence(model, Cascade(), tree, (1, 4), steps=8, choice=choice, draws=rows(1), trace=True)
    assert order_of(drawn.frames) == [1, 3, 2, 0, 1, 3, 2, 0], "level by level"
    drawn = confidence(model, Overlapping(), tree, (1, 4), steps=8, choice=choice, draws=rows(1), trace=True)
    assert order_of(drawn.frames) == [1, 1, 3, 3, 2, 2, 0, 0], "over all positions"
    if choice.temperature == 0:
        assert drawn.tokens.tolist() == [[0, 0, 0, 0]]


def test_children_are_drawn_in_an_order_that_is_not():
    """The law on the star by enumeration: the position with the highest probability first, then the other one."""
    tree, _ = tiny_world(nested=STAR)
    predict, root = random_predictor(tree, 3), 3
    begin = predict((root, root), 0.0)
    first = int(begin.amax(1).argmax())
    law = torch.zeros(3, 3, dtype=FLOAT)
    for x in range(3):
        rest = predict((x, root) if first == 0 else (root, x), 0.0)[1 - first]
        law[(x, slice(None)) if first == 0 else (slice(None), x)] = begin[first, x] * rest
    drawn = confidence(CachedTable(tree, predict), Cascade(), tree, (8000, 2), steps=2, draws=rows(8000))
    assert within_five_sigma(frequencies(drawn.tokens, 3), law.flatten())
    exact = order_law(Enumeration(tree, distribution(3, 2, 0)), Cascade(), timeless(predict))
    assert not within_five_sigma(frequencies(drawn.tokens, 3), exact), "it is no exact sampler of the model"


def test_the_tree_method_has_them_all():
    tree, _ = tiny_world()
    objective = TreeMethod().objective(tree, None)
    assert objective.samplers == ("ancestral", "first-hitting", "confidence")
    model = TableModel(tree, random_predictor(tree, 1))
    tokens = [objective.sample(model, (32, 3), steps=9, draws=rows(32), sampler=name).tokens for name in objective.samplers]
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[1], tokens[2])
    assert torch.equal(tokens[1], first_hitting(model, Cascade(), tree, (32, 3), steps=9, draws=rows(32)).tokens)
