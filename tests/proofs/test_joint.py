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
from tdlm.sample import Choice, Sampled
from tdlm.sample.walk import from_units
from tdlm.tree import Tree
from tests.proofs.test_bound import integrate as integrate_tree
from tests.proofs.test_bound import objective as tree_objective
from tests.proofs.test_sampler import CachedTable, frequencies, within_five_sigma
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


def draw(target: JointObjective, model, shape, steps: int, seed: int = 4, **options) -> Sampled:
    return target.sample(model, shape, steps=steps, draws=Draws(seed, 0, "joint", torch.arange(shape[0])), **options)


@pytest.mark.parametrize("process", [Cascade(), Cascade(Cosine()), Overlapping()])
@pytest.mark.parametrize("mode", ["unit", "marginal"])
def test_first_hitting_with_the_exact_joint_posterior_is_exact(process, mode):
    """S = 3 and L = 2: frequencies are p(x), with one evaluation for every unit and level."""
    tree, enumeration = tiny_world(nested=[[0, 1], [2, [3]]], length=3, seed=5)
    model = JointTable(tree, 2, exact_joint(enumeration, process, 2))
    drawn = draw(make(tree, process, mode), model, (6000, 3), 99, sampler="first-hitting")
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), enumeration.joint.flatten())
    assert int(drawn.evaluations.max()) <= 3 * (2 if mode == "unit" else 3)


@pytest.mark.parametrize("process", [Cascade(), Overlapping()])
@pytest.mark.parametrize("mode,steps", [("unit", 2), ("marginal", 2), ("marginal", 5)])
def test_a_sequence_that_is_one_neighbourhood_is_sampled_exactly_in_few_steps(process, mode, steps):
    """Positions that fall in one step are drawn together, so that even two steps give p(x); one by one they do not.

    In the overlapping process positions of one neighbourhood may cross different levels in one step: exact for units only.
    """
    if mode == "marginal" and isinstance(process, Overlapping):
        tree, enumeration = tiny_world(nested=[0, 1, 2], seed=1)
    else:
        tree, enumeration = tiny_world(nested=[[0, 1], [2, 3]], seed=1)
    model = JointTable(tree, 2, exact_joint(enumeration, process, 2))
    drawn = draw(make(tree, process, mode), model, (6000, 2), steps)
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), enumeration.joint.flatten())
    alone = tree_objective(tree, process).sample(CachedTable(tree, enumeration.exact), (6000, 2), steps=2,
                                                 draws=Draws(4, 0, "joint", torch.arange(6000)))
    assert not within_five_sigma(frequencies(alone.tokens, tree.size), enumeration.joint.flatten())


def test_the_law_of_two_steps_for_any_joint_network():
    """Star tree, marginal mode: both fall in the first step (1/4: together), one of them (1/4 each: summed over the other,
    then the other given it), or none (1/4)."""
    tree = Tree.star(3)
    predict = random_joint(tree, 2, 9)

    def table(*nodes):
        joint = predict(nodes, 0, 0).view(3, 3)
        for place, node in enumerate(nodes):
            if node != tree.root:
                keep = torch.zeros(3, dtype=FLOAT)
                keep[node] = 1
                joint = joint * (keep[:, None] if place == 0 else keep)
        return joint / joint.sum()

    M = tree.root
    law = 0.5 * table(M, M)
    for first in range(3):
        law += 0.25 * table(M, M).sum(1)[first] * table(first, M)
        law += 0.25 * table(M, M).sum(0)[first] * table(M, first)
    drawn = draw(make(tree, Cascade(), "marginal"), JointTable(tree, 2, predict), (8000, 2), 2)
    assert within_five_sigma(frequencies(drawn.tokens, 3), law.flatten())


@pytest.mark.parametrize("mode", ["unit", "marginal"])
@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "confidence"])
def test_a_gap_inside_a_neighbourhood_is_filled_in_the_light_of_its_neighbour(mode, sampler):
    """One position missing beside a given one of the same neighbourhood: p(x_2 | x_1), although the unit falls as one."""
    tree, enumeration = tiny_world(nested=[0, 1, 2, 3], seed=2)
    model = JointTable(tree, 2, exact_joint(enumeration, Cascade(), 2))
    given_tokens = torch.tensor([[3, -1]]).expand(5000, -1)
    drawn = draw(make(tree, Cascade(), mode), model, (5000, 2), 1, given=given_tokens, sampler=sampler)
    assert bool((drawn.tokens[:, 0] == 3).all())
    p = enumeration.joint[3] / enumeration.joint[3].sum()
    assert within_five_sigma(torch.bincount(drawn.tokens[:, 1], minlength=4).double(), p)


def test_a_given_token_in_an_unfinished_unit_stands_where_the_unit_stands():
    """Units are seen whole: a prompt that ends inside one falls along with it, a shown token never hides."""
    tree, seen = Tree.from_nested([[0, 1], [2, 3]]), set()

    class Listening(JointTable):
        def hidden(self, nodes, time, level):
            assert level is not None
            seen.update((tuple(row), int(at)) for row, at in zip(nodes.tolist(), level))
            return super().hidden(nodes, time, level)

    model = Listening(tree, 2, random_joint(tree, 2, 3))
    pads = torch.tensor([[-1] * 5 + [3]]).expand(40, -1)
    for sampler in ("ancestral", "first-hitting", "confidence"):
        seen.clear()
        drawn = draw(make(tree, Cascade(), "unit"), model, (40, 6), 20, prefix=torch.tensor([0, 3, 1]), given=pads,
                     shown=pads == 3, sampler=sampler)
        assert bool((drawn.tokens[:, :3] == torch.tensor([0, 3, 1])).all()) and bool((drawn.tokens[:, 5] == 3).all())
        heights = tree.node_height()
        for nodes, level in seen:
            at = [int(heights[node]) for node in nodes]
            assert at[:2] == [level, level], "a unit that is wholly given"
            assert at[2] == at[3] and at[5] == 0
        assert {nodes[2] for nodes, _ in seen} == {int(tree.ancestor[h, 1]) for h in range(3)}


@pytest.mark.parametrize("mode,process", [("unit", Cascade()), ("marginal", Cascade()), ("marginal", Overlapping())])
@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "confidence"])
def test_samples_do_not_depend_on_their_batch_and_steps_are_kept_to(mode, process, sampler):
    tree = Tree.from_nested([[0, 1], [2, [3, 4]], [5, 6, 7]])
    side = assembled(JointMethod(process, 3, mode=mode), tree)
    shake(side.model)
    for steps in (4, 9):
        together, alone = (side.objective.sample(side.model, (len(rows), 7), steps=steps, draws=Draws(3, 0, "b", rows),
                                                 sampler=sampler) for rows in (torch.arange(5), torch.tensor([3])))
        assert torch.equal(together.tokens[3], alone.tokens[0]) and int(together.evaluations[3]) == int(alone.evaluations[0])
        if sampler != "ancestral":
            assert int(together.evaluations.max()) <= steps
    exact = side.objective.sample(side.model, (5, 7), steps=60, draws=Draws(3, 0, "b", torch.arange(5)), sampler="first-hitting")
    assert exact.together is not None and exact.together.tolist() == [1] * 5


def test_the_most_certain_unit_falls_first():
    """In unit mode by its best combination, in marginal mode by the best child of a position's marginal."""
    tree = Tree.star(2)

    def predict(nodes, level, start):
        if start == 0:  # both tokens equal: every marginal is 1/2, the best combination has 0.5
            return torch.tensor([[0.5, 0.0], [0.0, 0.5]], dtype=FLOAT)
        return torch.tensor([[0.4, 0.3], [0.2, 0.1]], dtype=FLOAT)  # marginals 0.7 and 0.6, best combination 0.4

    def first_to_fall(mode):
        drawn = draw(make(tree, Cascade(), mode), JointTable(tree, 2, predict), (1, 4), 4, sampler="confidence", trace=True)
        return [i for i, h in enumerate(drawn.frames[1].heights) if h == 0]

    assert first_to_fall("unit") == [0, 1] and first_to_fall("marginal") == [2]


@pytest.mark.parametrize("mode", ["unit", "marginal"])
@pytest.mark.parametrize("source", ["loss", "count", "ancestral", "first-hitting", "confidence"])
def test_what_has_moved_is_known_to_the_head_in_training_as_in_sampling(mode, source):
    """In the cascade an inner node may be a child state: its own slot is then the only one left, its children are no matter."""
    tree, asked = Tree.from_nested([[0, 1], [2, 3], [4, 5]]), []

    class Spying(TableHead):
        def masked(self, hidden, parent, known):
            asked.append((parent, known))
            return super().masked(hidden, parent, known)

    model = JointTable(tree, 3, random_joint(tree, 3, 1))
    model.head = Spying(tree, 1, 3)
    target, tokens = make(tree, Cascade(), mode, 3), torch.arange(70).view(14, 5) % 6
    draws = Draws(1, 0, "known", torch.arange(14))
    if source in ("loss", "count"):
        {"loss": target.loss, "count": target.exact_count_loss}[source](model, tokens, draws=draws)
    else:
        target.sample(model, (14, 5), steps=20, draws=draws, sampler=source)
    parent, known = (torch.cat([pair[i] for pair in asked]) for i in (0, 1))
    heights = tree.node_height()[parent.clamp(min=0)].masked_fill(parent < 0, -1)
    top = heights.amax(1, keepdim=True)
    assert bool((known[heights == top] == -1).all()) and set(top[:, 0].tolist()) == {1, 2}
    assert torch.equal(known[heights < top], own_slots(tree)[parent.clamp(min=0)].masked_fill(parent < 0, 0)[heights < top])
    assert mode == "unit" or bool(((heights == 1) & (top == 2)).any()), "an inner node that has moved was among them"


def test_choices_act_on_what_falls_and_not_on_what_is_summed_out():
    """The best combination is (0, 0), but the first position's best child by itself is 1."""
    tree = Tree.star(3)
    table = torch.tensor([[0.3, 0.0, 0.0], [0.0, 0.25, 0.25], [0.1, 0.05, 0.05]], dtype=FLOAT)
    model = JointTable(tree, 2, lambda nodes, level, start: table)
    drawn = draw(make(tree, Cascade(), "marginal"), model, (200, 2), 2, sampler="first-hitting", choice=Choice(temperature=0.0))
    assert set(map(tuple, drawn.tokens.tolist())) == {(1, 1), (0, 0)}, "by the first position, or by the second (0: 0.4)"
    drawn = draw(make(tree, Cascade(), "unit"), model, (20, 2), 1, choice=Choice(temperature=0.0))
    assert set(map(tuple, drawn.tokens.tolist())) == {(0, 0)}


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
