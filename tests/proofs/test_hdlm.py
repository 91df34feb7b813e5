"""HDLM, proved: its process against matrix exponentials, its bound and its samplers against enumeration."""
from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.config import BackboneConfig, DataConfig, RunConfig
from tdlm.errors import ConfigError, SampleError, TreeError
from tdlm.model import DenseHead, Shared
from tdlm.objectives import HdlmMethod, HdlmObjective
from tdlm.process import Hierarchical, Overlapping
from tdlm.process.oracle import Enumeration, legendre
from tdlm.rng import Draws
from tdlm.sample.grid import times_for
from tdlm.train.plan import plan
from tdlm.tree import Tree
from tests.worlds import TableModel, distribution, random_predictor

FLOAT = torch.float64
NESTED = [[0, 1], [2, 3], [4]]
GAMMAS = [0.7, 1.0, 1.5, 2.0, 3.0]


def chain(gamma: float, s: float) -> Tensor:
    """Token, cluster, root: the transition matrix over a stretch s = -log(1 - t), from the rates alone.

    By its power series (torch.matrix_exp is right to 1e-11 only, and the smallest entries here are 1e-4)."""
    rates = s * torch.tensor([[-gamma, gamma, 0], [0, -1, 1], [0, 0, 0]], dtype=FLOAT)
    total = term = torch.eye(3, dtype=FLOAT)
    for k in range(1, 80):
        term = term @ rates / k
        total = total + term
    return total


def near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-11) -> bool:
    return torch.allclose(ours, theirs, rtol=tolerance, atol=1e-13)


@pytest.mark.parametrize("gamma", [*GAMMAS, 1 + 1e-9])
def test_occupancies_weights_and_the_reverse_are_those_of_the_chain(gamma):
    process = Hierarchical(gamma)
    for t, s in ((0.9, 0.3), (0.5, 0.0), (0.31, 0.3)):
        a, b = -math.log1p(-s), -math.log1p(-t)
        before, after, between = chain(gamma, a)[0], chain(gamma, b)[0], chain(gamma, b - a)
        moment = process.moment(torch.tensor([t], dtype=FLOAT), 2)
        assert near(moment.occupancy[0], after)
        rates = torch.tensor([gamma, 1.0], dtype=FLOAT) / (1 - t)
        assert near(moment.weight[0], rates * after[:2] / after[1:])
        assert near(process.reverse(t, s, 2), (before[:, None] * between / after).T, 1e-10)


@pytest.mark.parametrize("gamma", [0.3, 1 - 1e-6, 1.0, 1 + 1e-12, 2.0, 10.0])
def test_the_root_is_counted_without_cancellation(gamma):
    """w_2 = gamma s^2 / 2 (1 - (1 + gamma) s / 3 + ...) near t = 0, where the closed form has lost every digit."""
    s = torch.tensor([1e-17, 1e-12, 1e-8], dtype=FLOAT)
    series = gamma * s**2 / 2 * (1 - (1 + gamma) * s / 3)
    assert torch.allclose(Hierarchical(gamma).occupancy(-torch.expm1(-s), 2)[:, 2], series, rtol=1e-13, atol=0)


def test_at_gamma_one_it_is_the_overlapping_process():
    u = torch.tensor([1e-12, 0.1, 0.5, 0.99, 1 - 1e-12], dtype=FLOAT)
    ours, theirs = Hierarchical().moment(u, 2), Overlapping().moment(u, 2)
    assert near(ours.occupancy, theirs.occupancy) and near(ours.weight, theirs.weight)
    for later, earlier in ((1.0, 0.0), (1.0, 0.7), (0.5, 0.2), (0.2, 0.0)):
        assert near(Hierarchical().reverse(later, earlier, 2), Overlapping().reverse(later, earlier, 2))


@pytest.mark.parametrize("gamma", GAMMAS)
def test_drawn_arrivals_have_the_occupancies_as_their_law(gamma):
    rows, s = 20_000, 0.8
    clock, time = Hierarchical(gamma).arrivals(Draws(0, 0, "a", torch.arange(rows)).uniform("x", 2), 2)
    assert torch.allclose(time, -torch.expm1(-clock))
    counts = torch.bincount((clock <= s).sum(1), minlength=3) / rows
    p = chain(gamma, s)[0]
    assert ((counts - p).abs() < 5 * torch.sqrt(p * (1 - p) / rows)).all()


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_the_originals_step_keeps_the_marginals_and_reaches_every_token(gamma):
    """Given x, w(s) = w(t) K for a small step. It is not the chain's reverse; both agree to first order."""
    exact, theirs = Hierarchical(gamma), Hierarchical(gamma, step="marginal")
    before, after = exact.occupancy(torch.tensor([0.5, 0.6], dtype=FLOAT), 2)
    assert near(after @ exact.reverse(0.6, 0.5, 2), before) and near(after @ theirs.reverse(0.6, 0.5, 2), before)
    gaps = [(exact.reverse(0.6, 0.6 - d, 2) - theirs.reverse(0.6, 0.6 - d, 2)).abs().max() for d in (0.1, 0.01)]
    assert gaps[0] > 1e-3 and gaps[1] < gaps[0] / 50
    assert theirs.reverse(0.1, 0.0, 2)[:, 0].tolist() == [1, 1, 1]


class World:
    """All sequences over a tree of clusters, all noisy states, the exact answer for each."""

    def __init__(self, xi: float, length: int, nested=NESTED, seed: int = 0):
        self.tree, self.xi = Tree.from_nested(nested), xi
        V, n = self.tree.size, len(nested)
        self.eta = (1 - xi) / (n - 1)
        self.joint = distribution(V, length, seed)
        self.joint = self.joint / self.joint.sum()
        cluster = self.tree.ancestor[1]
        self.says = torch.zeros(self.tree.nodes, V, dtype=FLOAT)  # q(state | token) but for the height's probability
        self.says[:V] = torch.eye(V, dtype=FLOAT)
        for node in range(V, self.tree.root):
            self.says[node] = self.eta
            self.says[node, cluster == node] = xi
        self.says[self.tree.root] = 1
        self.known: dict = {}

    def others(self, nodes: tuple[int, ...], t: float = 0.5) -> Tensor:
        """log p(token) of every position given the other positions (S, V): depends on the states alone, not on t."""
        if nodes not in self.known:
            rows = []
            for i in range(len(nodes)):
                joint = self.joint
                for j, node in enumerate(nodes):
                    if j != i:
                        joint = joint * self.says[node].view([-1 if a == j else 1 for a in range(len(nodes))])
                mass = joint.sum([a for a in range(len(nodes)) if a != i]) if len(nodes) > 1 else joint
                rows.append(mass / mass.sum())
            self.known[nodes] = torch.stack(rows).log()
        return self.known[nodes]

    def states(self, x: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...], float]]:
        """Nodes, heights and q(clusters | x) of every noisy state of x."""
        V = self.tree.size
        single = [[(token, 0, 1.0)] + [(c, 1, float(self.says[c, token])) for c in range(V, self.tree.root)]
                  + [(self.tree.root, 2, 1.0)] for token in x]
        return [(tuple(s[0] for s in state), tuple(s[1] for s in state), math.prod(s[2] for s in state))
                for state in itertools.product(*single) if math.prod(s[2] for s in state)]


class Told:
    """A network whose hidden states are log p over tokens; the product's dense head does the rest, in float64."""

    told_time = False

    def __init__(self, tree: Tree, answer):
        self.answer, self.head = answer, DenseHead(tree, tree.size).double()
        self.head.weight.data = torch.eye(tree.size, dtype=FLOAT)

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return torch.stack([self.answer(tuple(row)) for row in nodes.tolist()])


def objective(world: World, gamma: float = 1.0, **options) -> HdlmObjective:
    return HdlmMethod(gamma=gamma, xi=world.xi, **options).objective(world.tree, None)


def integrate(world: World, target: HdlmObjective, model, x: tuple[int, ...]) -> float:
    """The product's loss, averaged exactly: quadrature over time, enumeration over states."""
    places, shares = legendre(12)
    s = torch.tensor([start + place for start in range(34) for place in places], dtype=FLOAT)
    moment = target.process.moment(-torch.expm1(-s), 2)
    share = torch.tensor([w for _ in range(34) for w in shares], dtype=FLOAT) * torch.exp(-s)
    total = 0.0
    for nodes, heights, chance in world.states(x):
        loss = target.score(model, torch.tensor(x).expand(len(s), -1), torch.tensor(nodes).expand(len(s), -1), moment)
        total += float((loss.bound * chance * moment.occupancy[:, heights].prod(1) * share).sum())
    return total


@pytest.mark.parametrize(("gamma", "xi"), [*((g, 1.0) for g in GAMMAS), (1.0, 0.9), (2.0, 0.9), (1.5, 0.6), (0.7, 0.2)])
def test_the_exact_denoiser_attains_minus_log_p(gamma, xi):
    """Also where xi < 1/n, that is where a wrong cluster is likelier than the own one."""
    world = World(xi, 2)
    target, model = objective(world, gamma), Told(world.tree, world.others)
    for x in ((0, 4), (3, 2), (1, 1)):
        assert integrate(world, target, model, x) == pytest.approx(-math.log(float(world.joint[x])), abs=1e-9)


def improper(world: World, seed: int = 0):
    """An arbitrary answer for every state."""
    def answer(nodes: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((nodes, seed)) % (1 << 62))
        return torch.randn(len(nodes), world.tree.size, generator=generator, dtype=FLOAT).log_softmax(-1)
    return answer


def step_down(world: World, p: Tensor, node: int) -> Tensor:
    """What becomes of one position at `node` when it falls, written out: clusters (in slot order), or tokens."""
    if node == world.tree.root:
        return torch.stack([(p * world.says[c]).sum() for c in range(world.tree.size, node)])
    weighed = p * world.says[node]
    return weighed / weighed.sum()


@pytest.mark.parametrize("xi", [1.0, 0.8, 0.3])
def test_it_bounds_the_likelihood_of_the_model_for_any_network(xi):
    """One position: the model's p(x) = sum_c M_c(root) p(x | c) in closed form, and the bound stays above -log of it."""
    world = World(xi, 1)
    answer, tree = improper(world), world.tree
    clusters = step_down(world, answer((tree.root,))[0].exp(), tree.root)
    p = sum(m * step_down(world, answer((tree.size + c,))[0].exp(), tree.size + c) for c, m in enumerate(clusters))
    assert isinstance(p, Tensor) and float(p.sum()) == pytest.approx(1, abs=1e-12)
    gaps = [integrate(world, objective(world, 2.0), Told(tree, answer), (x,)) + math.log(float(p[x])) for x in range(5)]
    assert min(gaps) > -1e-9 and (xi == 1 or max(gaps) > 1e-3)


def test_xi_near_one_is_xi_one():
    """The general formula runs into the plain one, state by state, gradients included."""
    plain, general = World(1.0, 2), World(1 - 1e-10, 2)
    answer = improper(plain)
    tokens = torch.tensor([(0, 2), (1, 3), (4, 4)])
    nodes = torch.tensor([(plain.tree.root, 6), (5, plain.tree.root), (7, 4)])
    moment = Hierarchical().moment(torch.tensor([0.2, 0.5, 0.9], dtype=FLOAT), 2)
    results = []
    for world in (plain, general):
        model = Told(world.tree, answer)
        loss = objective(world).score(model, tokens, nodes, moment)
        results.append((loss.bound, torch.autograd.grad(loss.train, model.head.weight)[0]))
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("xi", [1.0, 0.7])
def test_states_are_drawn_from_the_forward_process(xi):
    world, rows, x = World(xi, 1), 30_000, 3
    target, t = objective(world, 2.0), 0.6
    moment = target.process.moment(torch.full((rows,), t, dtype=FLOAT), 2)
    nodes = target.states(torch.full((rows, 1), x), moment, Draws(0, 0, "s", torch.arange(rows)))
    expected = torch.zeros(world.tree.nodes, dtype=FLOAT)
    for state, heights, chance in world.states((x,)):
        expected[state[0]] += chance * moment.occupancy[0, heights[0]]
    counts = torch.bincount(nodes[:, 0], minlength=world.tree.nodes) / rows
    assert float(expected.sum()) == pytest.approx(1) and int((expected > 0).sum()) == (3 if xi == 1 else 5)
    assert ((counts - expected).abs() <= 5 * torch.sqrt(expected * (1 - expected) / rows)).all()


def frequencies(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens[:, 0] * size + tokens[:, 1], minlength=size**2) / len(tokens)


def vector(law: dict[tuple[int, ...], float], size: int) -> Tensor:
    result = torch.zeros(size**2, dtype=FLOAT)
    for (first, second), mass in law.items():
        result[first * size + second] += mass
    return result


def within_five_sigma(found: Tensor, p: Tensor, rows: int) -> bool:
    return bool(((found - p).abs() <= 5 * torch.sqrt(p * (1 - p) / rows) + 1e-12).all())


@pytest.mark.parametrize("sampler", ["ancestral", "hdlm"])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_samplers_at_xi_one_have_the_law_that_the_oracle_follows(gamma, sampler):
    tree, rows = Tree.from_nested(NESTED), 6000
    predict = random_predictor(tree, 4)
    process = Hierarchical(gamma, step="exact" if sampler == "ancestral" else "marginal")
    law = vector(Enumeration(tree, torch.ones(5, 5)).law(process, times_for(process, 2, 3), predict), 5)
    drawn = HdlmMethod(head=Shared(), gamma=gamma).objective(tree, None).sample(
        TableModel(tree, predict), (rows, 2), steps=3, sampler=sampler, draws=Draws(1, 0, "s", torch.arange(rows)))
    assert float(law.sum()) == pytest.approx(1) and within_five_sigma(frequencies(drawn.tokens, 5), law, rows)


def test_the_exact_sampler_with_wrong_clusters_has_the_law_that_the_oracle_follows():
    """The walk over the detour tree, with every child's probability written out here from p and q."""
    world, rows = World(0.6, 2), 6000
    answer, target = improper(world), objective(world, 1.5)

    def predict(nodes: tuple[int, ...], t: float) -> Tensor:
        rows = [step_down(world, p.exp(), node) if node >= 5 else p for p, node in zip(answer(nodes), nodes)]
        return torch.stack([torch.nn.functional.pad(row, (0, 5 - len(row))) for row in rows])

    wide = Enumeration(target.detour, torch.ones(5, 5))
    law = vector(wide.law(target.process, times_for(target.process, 2, 3), predict), 5)
    drawn = target.sample(Told(world.tree, answer), (rows, 2), steps=3, draws=Draws(2, 0, "s", torch.arange(rows)))
    assert float(law.sum()) == pytest.approx(1) and within_five_sigma(frequencies(drawn.tokens, 5), law, rows)


def test_with_the_exact_denoiser_one_missing_position_is_exact_in_any_number_of_steps():
    """p(x_1 | x_2), though most positions pass through a wrong cluster."""
    world, rows = World(0.3, 2), 8000
    target, model = objective(world, 2.0), Told(world.tree, world.others)
    given = torch.tensor([[-1, 3]]).expand(rows, -1)
    p = world.joint[:, 3] / world.joint[:, 3].sum()
    for steps in (2, 20):
        drawn = target.sample(model, (rows, 2), steps=steps, given=given, draws=Draws(3, 0, "g", torch.arange(rows)))
        found = torch.bincount(drawn.tokens[:, 0], minlength=5) / rows
        assert within_five_sigma(found, p, rows) and (drawn.tokens[:, 1] == 3).all()


@pytest.mark.parametrize("xi", [1.0, 0.5])
def test_first_hitting_with_the_exact_denoiser_draws_from_the_joint_distribution(xi):
    """Two positions, two levels: four jumps, one evaluation each at most, and no error of steps."""
    world, rows = World(xi, 2), 8000
    target, model = objective(world, 2.0), Told(world.tree, world.others)
    drawn = target.sample(model, (rows, 2), steps=4, sampler="first-hitting", draws=Draws(4, 0, "f", torch.arange(rows)))
    assert within_five_sigma(frequencies(drawn.tokens, 5), world.joint.flatten(), rows)
    assert int(drawn.evaluations.max()) <= 4 and drawn.together is not None and int(drawn.together.max()) == 1


def test_n_steps_are_n_evaluations_and_one_more_at_most_for_the_originals_step():
    world = World(1.0, 4, nested=[[0, 1], [2, 3]])
    model, target = Told(world.tree, improper(world)), objective(world)
    for steps in (2, 5, 30):
        drawn = target.sample(model, (64, 4), steps=steps, sampler="hdlm", draws=Draws(1, 0, "n", torch.arange(64)))
        assert int(drawn.evaluations.max()) <= min(steps + 1, 8) and drawn.steps == steps


def test_faithful_training_leaves_pad_out_and_scratch_keeps_it():
    tree, pad = Tree.from_nested([[0, 1], [2, 3]]), 3
    tokens = torch.tensor([[0, 1, 2, pad], [1, pad, pad, pad]])
    nodes = torch.full_like(tokens, tree.root)
    world = World(1.0, 4, nested=[[0, 1], [2, 3]])
    model, moment = Told(tree, improper(world)), Hierarchical().moment(torch.tensor([0.3, 0.8], dtype=FLOAT), 2)
    losses = {}
    for variant in ("scratch", "faithful"):
        target = HdlmMethod(variant=variant).objective(tree, pad)  # pyright: ignore[reportArgumentType]
        losses[variant] = target.score(model, tokens, nodes, moment)
    clipped = moment.weight[:, 1].clamp(0, 2)[:, None]
    cost = -model.head.log_probs(model.hidden(nodes, moment.time, None).flatten(0, 1), nodes.flatten())
    cost = cost.gather(1, tree.slot[1, tokens].flatten()[:, None]).view(2, 4) * clipped
    assert float(losses["scratch"].train.detach()) == pytest.approx(float(cost.mean().detach()))
    assert float(losses["faithful"].train.detach()) == pytest.approx(float(cost[tokens != pad].mean().detach()))
    assert torch.equal(losses["scratch"].bound, losses["faithful"].bound), "what is published does not change"
    dropped = target.with_pad("drop")
    assert not dropped.is_bound and (dropped.score(model, tokens, nodes, moment).bound < losses["scratch"].bound).all()


def test_pad_of_given_length_is_never_hidden():
    tree, pad = Tree.from_nested([[0, 1], [2, 3]]), 3
    world = World(0.7, 2, nested=[[0, 1], [2, 3]])
    seen = []

    def answer(nodes):
        seen.append(nodes)
        return improper(world)(nodes)

    target = HdlmMethod(pad="given-length", xi=0.7).objective(tree, pad)
    target.loss(Told(tree, answer), torch.tensor([(0, pad)]).expand(50, -1), draws=Draws(0, 0, "p", torch.arange(50)))
    assert {nodes[1] for nodes in seen} == {pad} and len({nodes[0] for nodes in seen}) == 4


@pytest.mark.parametrize(("gamma", "xi"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.9), (3.0, 0.5)])
def test_gradients_are_finite_at_both_ends_of_time(gamma, xi):
    world = World(xi, 2)
    model, target = Told(world.tree, improper(world)), objective(world, gamma)
    for u in (1e-17, 1e-9, 0.5, 1 - 2**-53):
        moment = target.process.moment(torch.full((3,), u, dtype=FLOAT), 2)
        for nodes in ((0, 5), (5, 7), (7, 5), (8, 8)):
            loss = target.score(model, torch.tensor([(0, 0)]).expand(3, -1), torch.tensor(nodes).expand(3, -1), moment)
            if xi < 1 or 7 not in nodes:
                assert bool(torch.isfinite(torch.autograd.grad(loss.train, model.head.weight)[0]).all())
                assert bool(torch.isfinite(loss.bound).all())


def test_mistakes_are_named():
    two = Tree.from_nested(NESTED)
    with pytest.raises(TreeError, match="height 2"):
        HdlmMethod().objective(Tree.star(5), None)
    with pytest.raises(TreeError, match="token 2 hangs under the root"):
        HdlmMethod(xi=0.9).objective(Tree.from_nested([[0, 1], 2]), None)
    with pytest.raises(TreeError, match="at least 2 clusters"):
        HdlmMethod(xi=0.9).objective(Tree.from_nested([[0, 1, 2]]), None)
    with pytest.raises(ConfigError, match="head=dense"):
        HdlmMethod(xi=0.9, head=Shared())
    wrong: list[dict[str, Any]] = [{"xi": 0.0}, {"xi": 1.1}, {"gamma": 0.0}, {"gamma": math.inf},
                                   {"clip": (2.0, 1.0)}, {"clip": (-1.0, 1.0)}]
    for bad in wrong:
        with pytest.raises(ConfigError, match="must"):
            HdlmMethod(**bad)
    with pytest.raises(ConfigError, match="height 2"):
        Hierarchical().occupancy(torch.zeros(1, dtype=FLOAT), 3)
    world = World(1.0, 2)
    with pytest.raises(SampleError, match="shared out"):
        objective(world).sample(Told(two, improper(world)), (1, 2), steps=4, per_level=(2, 2),
                                draws=Draws(0, 0, "x", torch.arange(1)))


def test_a_dry_run_needs_no_tree():
    config = RunConfig("h", HdlmMethod(xi=0.9), DataConfig(length=16), BackboneConfig(1, 32, 2))
    counts = plan(config, vocabulary=100, branching=10)["parameters"]
    assert counts["head"] == 33 * 100
