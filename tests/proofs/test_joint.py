"""Joint prediction of a neighbourhood: which curves are bounds, proved by enumeration and quadrature, and its samplers' laws."""
from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.errors import ConfigError
from tdlm.model.joint import JointHead, own_slots
from tdlm.objectives import JointMethod, JointObjective, TreeMethod
from tdlm.process import Cascade, Cosine, Overlapping
from tdlm.process.oracle import Enumeration, legendre
from tdlm.registry import from_json, to_json
from tdlm.rng import Draws
from tdlm.sample import Choice
from tdlm.sample.walk import from_units
from tdlm.tree import Tree
from tests.proofs.test_bound import integrate as integrate_tree
from tests.proofs.test_bound import objective as tree_objective
from tests.proofs.test_sampler import CachedTable
from tests.worlds import distribution, processes, random_predictor, tiny_world, trees

FLOAT = torch.float64


class TableHead(JointHead):
    """The hidden state of a neighbourhood's first position already holds the log-probabilities of all combinations."""

    def logits(self, hidden, parent):
        return hidden[:, 0]


class JointTable:
    """A 'network' that looks up the joint distribution of every neighbourhood: (nodes, level, first position) -> (K^L,)."""

    told_time = False

    def __init__(self, tree: Tree, length: int, predict):
        self.tree, self.length, self.predict = tree, length, predict
        self.head: Any = TableHead(tree, 1, length)
        self.known: dict = {}

    def hidden(self, nodes, time, level):
        levels = [None] * len(nodes) if level is None else level.tolist()
        return torch.stack([self._row(tuple(row), at) for row, at in zip(nodes.tolist(), levels)])

    def _row(self, nodes, level):
        if (nodes, level) not in self.known:
            table = torch.zeros(len(nodes), self.head.outcomes, dtype=FLOAT)
            for start in range(0, len(nodes), self.length):
                table[start] = self.predict(nodes, level, start).flatten().clamp(min=1e-300).log()
            self.known[nodes, level] = table
        return self.known[nodes, level]


def open_places(tree: Tree, process, nodes, level) -> list[bool]:
    """Which positions can still choose: in the cascade those in the parent state of the level."""
    heights = tree.node_height()
    return [int(tree.num_children[z]) > 1 and (not process.knows_level or int(heights[z]) == level + 1) for z in nodes]


def exact_joint(enumeration: Enumeration, process, length: int):
    """The posterior of a neighbourhood's slots given the whole noisy sequence, by listing all sequences."""
    tree, own, heights = enumeration.tree, own_slots(enumeration.tree), enumeration.tree.node_height()
    masses = [(x, float(enumeration.joint[x])) for x in enumeration.sequences]

    def predict(nodes, level, start):
        joint = torch.zeros((tree.branching,) * length, dtype=FLOAT)
        free = open_places(tree, process, nodes, level)
        below = [set(enumeration.below(z)) for z in nodes]
        for x, mass in masses:
            if all(token in tokens for token, tokens in zip(x, below)):
                slots = [0] * length
                for place, i in enumerate(range(start, min(start + length, len(nodes)))):
                    slots[place] = int(tree.slot[heights[nodes[i]] - 1, x[i]]) if free[i] else int(own[nodes[i]])
                joint[tuple(slots)] += mass
        return joint / joint.sum()
    return predict


def random_joint(tree: Tree, length: int, seed: int = 0):
    """An arbitrary joint distribution for every noisy sequence and neighbourhood."""
    def predict(nodes, level, start):
        generator = torch.Generator().manual_seed(hash((nodes, start, seed)) % (1 << 62))
        return torch.rand(tree.branching**length, generator=generator, dtype=FLOAT) ** 3 + 0.02
    return predict


def product_joint(tree: Tree, length: int, predict):
    """A joint distribution that factorises into a per-position predictor's."""
    def joint(nodes, level, start):
        each = predict(nodes, 0.5).clamp(min=1e-4)  # slots of probability 0 are masked by the head, or the only one left
        product = each[start]
        for i in range(start + 1, start + length):
            product = product[..., None] * (each[i] if i < len(nodes) else torch.ones(tree.branching, dtype=FLOAT))
        return product
    return joint


def make(tree: Tree, process, mode: str, length: int = 2, pad_id=None, pad="count", **options) -> JointObjective:
    method = JointMethod(process=process, neighbourhood=length, mode=mode, clip=options.pop("clip", None), **options)  # type: ignore[arg-type]
    return method.objective(tree, pad_id).with_pad(pad)  # type: ignore[arg-type]


def integrate(target: JointObjective, model, x: tuple[int, ...], count: int = 12) -> tuple[torch.Tensor, float]:
    """Bound by level and train loss (nats a sequence), averaged exactly: quadrature of time, enumeration of units' heights."""
    tree, process, length = target.tree, target.process, len(x)
    nodes, weights = legendre(count)
    if isinstance(process, Cascade):
        edges = process.edges(tree.height)
        grid = [(low + (high - low) * a, (high - low) * w) for low, high in itertools.pairwise(edges)
                for a, w in zip(nodes, weights)]
    else:
        grid = [(-math.expm1(-(s + a)), w * math.exp(-(s + a))) for s in range(34) for a, w in zip(nodes, weights)]
    moment = process.moment(torch.tensor([g[0] for g in grid], dtype=FLOAT), tree.height)
    share = torch.tensor([g[1] for g in grid], dtype=FLOAT)
    bound, train = torch.zeros(tree.height, dtype=FLOAT), 0.0
    for pattern in itertools.product(range(tree.height + 1), repeat=-(-length // target.unit)):
        chance = torch.stack([moment.occupancy[:, h] for h in pattern]).prod(0)
        alive = (chance > 0).nonzero()[:, 0]
        if not len(alive):
            continue
        heights = from_units(torch.tensor([pattern]), target.unit, length).expand(len(alive), -1)
        part = type(moment)(moment.time[alive], None if moment.level is None else moment.level[alive],
                            moment.occupancy[alive], moment.weight[alive], moment.train_weight[alive])
        scale = (chance * share)[alive]
        part_train = replace(part, train_weight=part.train_weight * scale[:, None])
        loss = target.score(model, torch.tensor([x]).expand(len(alive), -1), heights, part_train)
        bound += (loss.parts["levels"] * scale[:, None]).sum(0)
        train += float(loss.train) * len(alive) * length
    return bound, train


@settings(max_examples=20)
@given(trees(max_leaves=5), processes(), st.integers(0, 1000), st.integers(2, 3), st.integers(2, 3), st.data())
def test_unit_mode_attains_minus_log_p_with_the_exact_joint_posterior(tree, process, seed, length, positions, data):
    """Dependent tokens, a last shorter unit (S = 3, L = 2) and one that is longer than the text (S = 2, L = 3)."""
    enumeration = Enumeration(tree, distribution(tree.size, positions, seed))
    x = tuple(data.draw(st.integers(0, tree.size - 1)) for _ in range(positions))
    model = JointTable(tree, length, exact_joint(enumeration, process, length))
    got, train = integrate(make(tree, process, "unit", length), model, x, 16)
    assert float(got.sum()) == pytest.approx(-math.log(float(enumeration.joint[x])), abs=1e-9)
    assert train == pytest.approx(float(got.sum()), abs=1e-9), "without clipping the two have one mean"


@pytest.mark.parametrize("process", [Cascade(), Overlapping()])
@pytest.mark.parametrize("mode", ["unit", "marginal"])
def test_any_joint_network_publishes_no_less_than_the_entropy(process, mode):
    """E_x bound >= H(X), for arbitrary joint distributions, in both modes."""
    for nested, positions in (([0, 1], 3), ([[0, 1], [2]], 2)):
        tree = Tree.from_nested(nested)
        enumeration = Enumeration(tree, distribution(tree.size, positions, 7))
        entropy = -float((enumeration.joint * enumeration.joint.log()).sum())
        for seed in (0, 1):
            model = JointTable(tree, 2, random_joint(tree, 2, seed))
            mean = sum(float(enumeration.joint[x]) * float(integrate(make(tree, process, mode), model, x)[0].sum())
                       for x in enumeration.sequences)
            assert mean >= entropy + 1e-3


@pytest.mark.parametrize("length", [2, 4])
def test_the_joint_cross_entropy_with_the_weight_of_one_position_is_no_bound(length):
    """L equal tokens: independent corruption and the joint cross-entropy give 1/L of the entropy; the marginals' bound is log 2.

    (This is the train loss of the marginal mode, which is why it is not what is published.)
    """
    tree = Tree.star(2)
    joint = torch.zeros((2,) * length, dtype=FLOAT)
    joint[(0,) * length] = joint[(1,) * length] = 0.5
    enumeration = Enumeration(tree, joint)
    model = JointTable(tree, length, exact_joint(enumeration, Cascade(), length))
    for process in (Cascade(), Cascade(Cosine())):
        bound, wrong = integrate(make(tree, process, "marginal", length), model, (1,) * length, 16)
        assert wrong == pytest.approx(math.log(2) / length, abs=1e-9)
        assert float(bound.sum()) == pytest.approx(math.log(2), abs=1e-9)
        honest, _ = integrate(make(tree, process, "unit", length), model, (1,) * length, 16)
        assert float(honest.sum()) == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.parametrize("process", [Cascade(), Cascade(Cosine()), Overlapping()])
@pytest.mark.parametrize("nested,x", [([0, 1, 2], (2, 0, 1)), ([[0, 1], [2, [3]], 4], (3, 1)), ([[[0, 1]], [2, 3]], (1, 2, 1))])
def test_marginal_mode_publishes_the_bound_of_its_marginals(process, nested, x):
    """Exact joint posterior: -log p(x). A joint that factorises: the tree method's bound, and in the cascade its loss."""
    tree, enumeration = tiny_world(nested=nested, length=len(x), seed=3)
    target = make(tree, process, "marginal")
    got, _ = integrate(target, JointTable(tree, 2, exact_joint(enumeration, process, 2)), x, 16)
    assert float(got.sum()) == pytest.approx(-math.log(float(enumeration.joint[x])), abs=1e-9)
    predict = random_predictor(tree, 5)
    got, train = integrate(target, JointTable(tree, 2, product_joint(tree, 2, predict)), x, 10)
    wanted = integrate_tree(tree_objective(tree, process), CachedTable(tree, predict), enumeration, x, 10)
    assert torch.allclose(got, wanted, atol=1e-9)
    if isinstance(process, Cascade):
        assert train == pytest.approx(float(wanted.sum()), abs=1e-9)


@pytest.mark.parametrize("mode", ["unit", "marginal"])
@pytest.mark.parametrize("pad", ["count", "given-length", "drop"])
@pytest.mark.parametrize("length", [2, 3])
def test_pad_modes(mode, pad, length):
    """PAD shares a unit with text (L = 2: x y | z PAD; L = 3: x y z | PAD): what each mode bounds."""
    tree, pad_id = Tree.from_nested([[0, 1], [2, 3]]), 3
    joint = torch.zeros(4, 4, 4, 4, dtype=FLOAT)
    raw = torch.rand(3, 3, 3, 4, dtype=FLOAT, generator=torch.Generator().manual_seed(1)) ** 2 + 0.05
    joint[:3, :3, :3] = raw
    enumeration = Enumeration(tree, joint)
    x = (2, 0, 1, pad_id)
    p, with_length = float(enumeration.joint[x]), float(enumeration.joint[..., pad_id].sum())
    model = JointTable(tree, length, exact_joint(enumeration, Cascade(), length))
    target = make(tree, Cascade(), mode, length, pad_id, pad)
    got = float(integrate(target, model, x, 8)[0].sum())
    if pad == "count":
        assert got == pytest.approx(-math.log(p), abs=1e-9)
    elif pad == "given-length":
        assert got == pytest.approx(-math.log(p / with_length), abs=1e-9)
    else:
        assert got < -math.log(p) - 1e-3 and not target.is_bound
    loss = target.loss(model, torch.tensor([x, (0, 1, 2, 0)]), draws=Draws(0, 0, "x", torch.arange(2)))
    assert loss.parts["tokens"].tolist() == [3, 4], "reported per real token"


@pytest.mark.parametrize("mode,length", [("unit", 2), ("unit", 3), ("marginal", 2)])
@pytest.mark.parametrize("pad", ["count", "drop", "given-length"])
def test_the_count_estimator_estimates_the_same_bound(mode, length, pad):
    tree, process = Tree.from_nested([[0, 1], [[2]], [3, [4, 5]]]), Cascade(Cosine())
    x, count = (4, 2, 5, 0, 2), 3000
    model = JointTable(tree, length, random_joint(tree, length, 1))
    target = make(tree, process, mode, length, 5, pad)
    truth, _ = integrate(target, model, x, 8)
    loss = target.exact_count_loss(model, torch.tensor(x).expand(count, -1), draws=Draws(3, 0, "c", torch.arange(count)))
    spread = loss.parts["levels"].std(0) / math.sqrt(count) + 1e-9
    assert bool(((loss.parts["levels"].mean(0) - truth).abs() < 5 * spread).all())


def assembled(method, tree: Tree, conditioning: Any = "none"):
    config = RunConfig("t", method, DataConfig(length=7), BackboneConfig(1, 16, 2, conditioning, 8), TrainConfig())
    return assemble(config, tree, pad_id=4)


def shake(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("process,conditioning", [(Cascade(), "none"), (Cascade(Cosine()), "level"), (Overlapping(), "time")])
@pytest.mark.parametrize("mode", ["unit", "marginal"])
@pytest.mark.parametrize("combine", ["concat", "mean"])
def test_a_neighbourhood_of_one_is_the_tree_method(process, conditioning, mode, combine):
    """To the bit: losses, bounds, estimators, gradients and samples of every sampler."""
    tree = Tree.from_nested([[0, 1], [2, [3, 4]], [5, 6, 7]])
    plain = assembled(TreeMethod(process, level_weights="linear", level_gamma=0.5), tree, conditioning)
    joint = assembled(JointMethod(process, 1, combine, mode, level_weights="linear", level_gamma=0.5), tree, conditioning)
    shake(plain.model)
    joint.model.load_state_dict(plain.model.state_dict())
    tokens = torch.randint(0, 8, (12, 7), generator=torch.Generator().manual_seed(0))
    for pad in ("count", "given-length", "drop"):
        pairs = zip(plain.objective.with_pad(pad).estimators(plain.model).values(),
                    joint.objective.with_pad(pad).estimators(joint.model).values(), strict=True)
        for theirs, ours in pairs:
            a, b = (score(m, tokens, draws=Draws(1, 0, "x", torch.arange(12)))
                    for score, m in ((theirs, plain.model), (ours, joint.model)))
            assert torch.equal(a.train, b.train) and torch.equal(a.bound, b.bound)
            assert torch.equal(a.parts["levels"], b.parts["levels"])
    for side in (plain, joint):
        side.objective.loss(side.model, tokens, draws=Draws(1, 0, "x", torch.arange(12))).train.backward()
    for p, q in zip(plain.model.parameters(), joint.model.parameters(), strict=True):
        a, b = (torch.zeros_like(p) if side.grad is None else side.grad for side in (p, q))
        assert torch.equal(a, b)
    assert plain.objective.samplers == joint.objective.samplers
    given_tokens = torch.tensor([[-1, 3, -1, -1, 4, -1, -1]]).expand(4, -1)
    for sampler in plain.objective.samplers:
        a, b = (side.objective.sample(side.model, (4, 7), steps=6, draws=Draws(2, 0, "s", torch.arange(4)), sampler=sampler,
                                      given=given_tokens, shown=given_tokens == 4, choice=Choice(temperature=0.7))
                for side in (plain, joint))
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.evaluations, b.evaluations)


def test_settings_are_checked_and_kept():
    tree = Tree.from_nested([[0, 1, 2, 3], [4, 5, 6, 7]])
    method = JointMethod(neighbourhood=4, combine="mean", mode="marginal", clip=None)
    assert from_json(object, to_json(method)) == method
    with pytest.raises(ConfigError, match="neighbourhood"):
        JointMethod(neighbourhood=0)
    with pytest.raises(ConfigError, match="clip"):
        JointMethod(clip=-1.0)
    with pytest.raises(ConfigError, match="at most 10"):
        JointMethod(neighbourhood=11).objective(tree, None)
