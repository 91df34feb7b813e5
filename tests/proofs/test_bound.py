"""The bound, proved: by enumeration of all noisy sequences and quadrature of time, with the product's own loss code."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.objectives import TreeMethod
from tdlm.objectives.base import is_pad
from tdlm.objectives.tree import TreeObjective
from tdlm.process import Cascade, Cosine, Overlapping
from tdlm.process.oracle import Enumeration, legendre
from tdlm.rng import Draws
from tdlm.tree import Tree
from tests.worlds import TableModel, distribution, processes, random_predictor, tiny_world, trees, uniform_predictor

FLOAT = torch.float64


def objective(tree: Tree, process, pad_id=None, pad="count", **options) -> TreeObjective:
    return TreeMethod(process=process, clip=options.pop("clip", None), **options).objective(tree, pad_id).with_pad(pad)


def integrate(target: TreeObjective, model, enumeration: Enumeration, x: tuple[int, ...], count: int = 12) -> torch.Tensor:
    """The product's loss, averaged exactly: quadrature over the drawn time, enumeration over the drawn heights."""
    tree, process = target.tree, target.process
    nodes, weights = legendre(count)
    if isinstance(process, Cascade):
        edges = process.edges(tree.height)
        grid = [(low + (high - low) * a, (high - low) * w)
                for low, high in zip(edges, edges[1:]) for a, w in zip(nodes, weights)]
    else:
        grid = [(-math.expm1(-(s + a)), w * math.exp(-(s + a))) for s in range(34) for a, w in zip(nodes, weights)]
    times = torch.tensor([g[0] for g in grid], dtype=FLOAT)
    total = torch.zeros(tree.height, dtype=FLOAT)
    tokens = torch.tensor(x).expand(len(times), -1)
    moment = process.moment(times, tree.height)
    pad = is_pad(tokens[0], target.pad_id)
    for heights in enumeration.patterns:
        if target.pad == "given-length" and any(h and p for h, p in zip(heights, pad.tolist())):
            continue
        free = [i for i in range(len(x)) if not (target.pad == "given-length" and bool(pad[i]))]
        chance = torch.ones(len(times), dtype=FLOAT)
        for i in free:
            chance = chance * moment.occupancy[:, heights[i]]
        if not bool((chance > 0).any()):
            continue
        loss = target.score(model, tokens, torch.tensor(heights).expand(len(times), -1), moment)
        share = chance * torch.tensor([g[1] for g in grid], dtype=FLOAT)
        total += (loss.parts["levels"] * share[:, None]).sum(0)
    return total


@settings(max_examples=25)
@given(trees(), processes(), st.data())
def test_uniform_predictor_costs_the_logarithms_of_the_children(tree, process, data):
    x = tuple(data.draw(st.lists(st.integers(0, tree.size - 1), min_size=1, max_size=2)))
    enumeration = Enumeration(tree, torch.ones((tree.size,) * len(x)))
    expected = sum(math.log(int(tree.num_children[tree.ancestor[level + 1, token]]))
                   for token in x for level in range(tree.height))
    got = integrate(objective(tree, process), TableModel(tree, uniform_predictor(tree)), enumeration, x)
    assert float(got.sum()) == pytest.approx(expected, abs=1e-9)
    assert float(enumeration.bound(process, x, lambda z, t: uniform_rows(tree, z)).sum()) == pytest.approx(expected, abs=1e-9)


def uniform_rows(tree: Tree, nodes: tuple[int, ...]) -> torch.Tensor:
    kids = tree.num_children[torch.tensor(nodes)]
    return (1 / kids.double())[:, None].expand(-1, tree.branching)


@settings(max_examples=20)
@given(trees(max_leaves=6), processes(), st.integers(0, 10_000), st.data())
def test_exact_denoiser_attains_minus_log_p(tree, process, seed, data):
    """Equation of the cross-level ELBO: with the exact posterior NELBO(x) = -log p(x) for every x."""
    length = data.draw(st.integers(1, 2 if tree.size > 4 or tree.height > 2 else 3))
    enumeration = Enumeration(tree, distribution(tree.size, length, seed))
    x = tuple(data.draw(st.integers(0, tree.size - 1)) for _ in range(length))
    got = integrate(objective(tree, process), TableModel(tree, enumeration.exact), enumeration, x, count=16)
    assert float(got.sum()) == pytest.approx(-math.log(float(enumeration.joint[x])), abs=1e-9)


@settings(max_examples=15)
@given(trees(max_leaves=6), st.integers(0, 10_000), st.data())
def test_cascade_levels_are_conditional_likelihoods(tree, seed, data):
    """NELBO_l(x) = -log p(ancestors at l | ancestors at l+1): true for the cascade only."""
    enumeration = Enumeration(tree, distribution(tree.size, 2, seed))
    x = tuple(data.draw(st.integers(0, tree.size - 1)) for _ in range(2))
    got = integrate(objective(tree, Cascade()), TableModel(tree, enumeration.exact), enumeration, x)
    for level in range(tree.height):
        mass = []
        for h in (level, level + 1):
            masks = [(tree.ancestor[h] == tree.ancestor[h, token]).double() for token in x]
            mass.append(float((enumeration.joint * torch.outer(*masks)).sum()))
        assert float(got[level]) == pytest.approx(-math.log(mass[0] / mass[1]), abs=1e-9)


def test_overlapping_levels_are_not_comparable_but_their_sum_is():
    tree, enumeration = tiny_world()
    model = TableModel(tree, enumeration.exact)
    cascade = integrate(objective(tree, Cascade()), model, enumeration, (3, 1))
    overlapping = integrate(objective(tree, Overlapping()), model, enumeration, (3, 1), count=16)
    assert float(cascade.sum()) == pytest.approx(float(overlapping.sum()), abs=1e-9)
    assert (cascade - overlapping).abs().max() > 1e-2


@settings(max_examples=12)
@given(trees(max_leaves=5), processes(), st.integers(0, 100))
def test_any_predictor_gives_what_the_oracle_gives(tree, process, seed):
    """Product and oracle agree per level for an arbitrary network, not only for the exact one."""
    enumeration = Enumeration(tree, distribution(tree.size, 2, seed))
    x = (0, tree.size - 1)
    predict = random_predictor(tree, seed)
    got = integrate(objective(tree, process), TableModel(tree, predict), enumeration, x, count=24)
    assert torch.allclose(got, enumeration.bound(process, x, predict), atol=1e-9)


@settings(max_examples=10)
@given(trees(max_leaves=5), processes(), st.integers(0, 100))
def test_it_is_a_bound_for_any_predictor_in_the_mean(tree, process, seed):
    """E_x NELBO >= H(X): no network can publish less than the entropy."""
    enumeration = Enumeration(tree, distribution(tree.size, 1, seed))
    model = TableModel(tree, random_predictor(tree, seed))
    mean = sum(float(p) * float(integrate(objective(tree, process), model, enumeration, x).sum())
               for x, p in zip(enumeration.sequences, enumeration.joint.flatten()))
    entropy = -float((enumeration.joint * enumeration.joint.log()).sum())
    assert mean >= entropy - 1e-9


@pytest.mark.parametrize("height", [2, 3])
def test_global_time_does_not_count_a_level_h_times(height):
    """The factor-H trap: one t over all levels with the derivative in global time, and no further factor."""
    nested = [[0, 1], [2, 3]] if height == 2 else [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    tree = Tree.from_nested(nested)
    enumeration = Enumeration(tree, torch.ones(tree.size))
    got = integrate(objective(tree, Cascade()), TableModel(tree, uniform_predictor(tree)), enumeration, (1,))
    assert torch.allclose(got, torch.full((height,), math.log(2), dtype=FLOAT))
    draws = Draws(0, 0, "trap", torch.arange(4096))
    tokens = torch.ones(4096, 1, dtype=torch.int64)
    loss = objective(tree, Cascade()).loss(TableModel(tree, uniform_predictor(tree)), tokens, draws=draws)
    assert float(loss.bound.mean()) == pytest.approx(height * math.log(2), rel=0.1)
    assert float(loss.bound.mean()) < 1.5 * height * math.log(2), "H times too much would be here"


def test_thresholds_change_nothing_in_the_bound():
    tree, enumeration = tiny_world()
    model = TableModel(tree, enumeration.exact)
    even = integrate(objective(tree, Cascade()), model, enumeration, (2, 4))
    skewed = integrate(objective(tree, Cascade(thresholds=(0.1, 0.9))), model, enumeration, (2, 4))
    assert torch.allclose(even, skewed, atol=1e-9)


def test_a_chain_of_single_children_changes_nothing():
    plain = Tree.from_nested([[0, 1], [2, 3]])
    chained = Tree.from_nested([[[0, 1]], [[2, 3]]])
    joint = distribution(4, 2, 5)
    for process in (Cascade(), Overlapping()):
        for x in ((0, 3), (2, 2)):
            values = []
            for tree in (plain, chained):
                enumeration = Enumeration(tree, joint)
                model = TableModel(tree, enumeration.exact)
                values.append(float(integrate(objective(tree, process), model, enumeration, x, 16).sum()))
            assert values[0] == pytest.approx(values[1], abs=1e-9)


@pytest.mark.parametrize("pad", ["count", "given-length", "drop"])
def test_pad_modes(pad):
    """count bounds -log p(x), given-length -log p(x | length), and drop falls below -log p(x): it is no bound."""
    tree = Tree.from_nested([[0, 1], [2, 3]])
    pad_id = 3
    joint = torch.zeros(4, 4, dtype=FLOAT)
    joint[:3, :3] = torch.rand(3, 3, dtype=FLOAT, generator=torch.Generator().manual_seed(1)) + 0.1
    joint[:3, 3] = torch.tensor([0.5, 0.1, 0.9], dtype=FLOAT)
    enumeration = Enumeration(tree, joint)
    x = (2, pad_id)
    p = float(enumeration.joint[x])
    length_mass = float(enumeration.joint[:3, 3].sum())

    def exact(nodes, t):
        return enumeration.exact(nodes)

    got = float(integrate(objective(tree, Cascade(), pad_id, pad), TableModel(tree, exact), enumeration, x).sum())
    if pad == "count":
        assert got == pytest.approx(-math.log(p), abs=1e-9)
    elif pad == "given-length":
        assert got == pytest.approx(-math.log(p / length_mass), abs=1e-9)
    else:
        assert got < -math.log(p) - 1e-3
    loss = objective(tree, Cascade(), pad_id, pad).loss(TableModel(tree, exact), torch.tensor([x, (0, 1)]),
                                                        draws=Draws(0, 0, "x", torch.arange(2)))
    assert loss.parts["tokens"].tolist() == [1, 2]


@pytest.mark.parametrize("alpha", [None, Cosine()])
@pytest.mark.parametrize("pad", ["count", "drop", "given-length"])
def test_the_count_estimator_estimates_the_same_bound(alpha, pad):
    """Averaged over many draws it equals the enumerated bound within 5 standard errors, per level, single children included."""
    tree = Tree.from_nested([[0, 1], [[2]], [3, [4, 5]]])
    process = Cascade() if alpha is None else Cascade(alpha)
    enumeration = Enumeration(tree, distribution(6, 3, 2))
    x = (4, 2, 5)
    model = TableModel(tree, random_predictor(tree, 1))
    target = objective(tree, process, 5, pad)
    truth = integrate(target, model, enumeration, x, count=16)
    rows = 4000
    loss = target.exact_count_loss(model, torch.tensor(x).expand(rows, -1), draws=Draws(3, 0, "count", torch.arange(rows)))
    spread = loss.parts["levels"].std(0) / math.sqrt(rows) + 1e-9
    assert ((loss.parts["levels"].mean(0) - truth).abs() < 5 * spread).all()


def test_the_count_estimator_has_no_noise_of_time_and_a_uniform_predictor_no_noise_at_all():
    tree = Tree.from_nested([[0, 1, 2], [3, 4, 5]])
    tokens = torch.randint(0, 6, (64, 16), generator=torch.Generator().manual_seed(0))
    model, target = TableModel(tree, uniform_predictor(tree)), objective(tree, Cascade())
    exact = target.exact_count_loss(model, tokens, draws=Draws(0, 0, "a", torch.arange(64)))
    assert torch.allclose(exact.bound, torch.full((64,), 16 * math.log(6), dtype=FLOAT))
    sampled = target.loss(model, tokens, draws=Draws(0, 0, "a", torch.arange(64)))
    assert sampled.bound.std() > 1


@pytest.mark.parametrize("process", [Cascade(), Cascade(Cosine()), Overlapping()])
def test_gradients_are_finite_at_both_ends_of_time(process):
    tree = Tree.from_nested([[0, 1], [2, 3]])
    tokens = torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(0))
    for u in (0.0, 5e-324, 1e-300, 1e-17, 0.5, 1 - 2**-53, 1.0):
        if isinstance(process, Overlapping) and u == 1.0:
            continue  # s is infinite there; draws lie in the open interval
        moment = process.moment(torch.full((6,), u, dtype=FLOAT), 2, clip=2.0)
        table = torch.zeros(4, 2, dtype=FLOAT, requires_grad=True)
        model = TableModel(tree, uniform_predictor(tree))
        model.hidden = lambda nodes, time, level, table=table: table[nodes.clamp(max=3)]
        for heights in (torch.zeros(6, 5, dtype=torch.int64), torch.full((6, 5), 1), torch.full((6, 5), 2)):
            loss = objective(tree, process, clip=2.0).score(model, tokens, heights, moment)
            gradient = torch.autograd.grad(loss.train, table, allow_unused=True)[0]
            assert bool(torch.isfinite(loss.train))
            assert gradient is None or bool(torch.isfinite(gradient).all())
            if u >= 1e-300 and bool((moment.occupancy.gather(1, heights) > 0).all()):
                assert bool(torch.isfinite(loss.bound).all())


@settings(max_examples=20)
@given(st.integers(2, 6), st.floats(0.1, 0.9), st.sampled_from([2.0, 10.0, None]))
def test_training_clips_in_local_time_and_keeps_the_factor(height, local, clip):
    process = Cascade()
    u = torch.tensor([(1 + local) / height], dtype=FLOAT)
    moment = process.moment(u, height, clip)
    wanted = (1 / local if clip is None else min(1 / local, clip)) * height
    assert float(moment.train_weight[0, 1]) == pytest.approx(wanted, rel=1e-9)
    assert float(moment.weight[0, 1]) == pytest.approx(height / local, rel=1e-9)


def test_level_weights_never_leak_into_the_bound():
    tree, enumeration = tiny_world()
    model = TableModel(tree, enumeration.exact)
    tokens = torch.randint(0, 5, (32, 2), generator=torch.Generator().manual_seed(0))
    draws = Draws(1, 0, "x", torch.arange(32))
    plain = objective(tree, Cascade()).loss(model, tokens, draws=draws)
    for kind in ("linear", "exponential"):
        weighted = objective(tree, Cascade(), clip=2.0, level_weights=kind, level_gamma=0.7).loss(model, tokens, draws=draws)
        assert torch.equal(weighted.bound, plain.bound)
        assert not torch.allclose(weighted.train, plain.train)


def test_level_weights_follow_the_formula():
    from tdlm.objectives.tree import level_weights
    linear, exponential = level_weights("linear", 0.5, 4), level_weights("exponential", 0.3, 4)
    raw = torch.tensor([1 + 0.5 * k / 3 for k in range(4)], dtype=FLOAT)
    assert torch.allclose(linear, raw / raw.mean()) and float(linear.mean()) == pytest.approx(1)
    raw = torch.tensor([math.exp(0.3 * k) for k in range(4)], dtype=FLOAT)
    assert torch.allclose(exponential, raw / raw.mean())
    assert level_weights("linear", 0.5, 1).tolist() == [1.0]


def test_hdlm_closed_form_weights():
    """For H = 2 the overlapping process is the hierarchical baseline's with gamma = 1, xi = 1 (baselines.md 2.5)."""
    t = torch.tensor([0.1, 0.5, 0.9], dtype=FLOAT)
    moment = Overlapping().moment(t, 2)
    log = torch.log1p(-t)
    cluster, mask = -(1 - t) * log, t + (1 - t) * log
    assert torch.allclose(moment.occupancy, torch.stack([1 - t, cluster, mask], 1))
    assert torch.allclose(moment.weight, torch.stack([1 / cluster, -log / mask], 1))
