"""The flat jump processes, proved: kernels and bounds of GIDD and SEDD against enumeration."""
from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tdlm.errors import ConfigError, TreeError
from tdlm.model.head import Shared, Tied
from tdlm.model.kernels import linear_ce
from tdlm.objectives import GiddMethod, SeddMethod, TreeMethod, wide
from tdlm.process import Cascade, Moment
from tdlm.process import flat_oracle as oracle
from tdlm.process.flat import Hybrid, Uniform, corrupt, posterior
from tdlm.process.flat_oracle import FlatWorld
from tdlm.rng import Draws
from tdlm.tree import Tree
from tests.flat_worlds import RawHead, Table, arbitrary, integrate, objective, ratios_from, softmax, to_raw, within_five_sigma
from tests.worlds import distribution

FLOAT = torch.float64
HYBRIDS = st.builds(Hybrid, st.integers(2, 4), st.sampled_from([0.0, 1e-6, 0.1, 0.2, 0.7]), st.sampled_from([0.5, 1.0, 1.7, 2.0]))
PROCESSES = st.one_of(HYBRIDS, st.builds(Uniform, st.integers(2, 4), st.sampled_from([1e-3, 0.2])))
TIMES = st.floats(1e-6, 0.999, allow_subnormal=False)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=FLOAT)


def as_matrix(mix, size: int) -> Tensor:
    noise = torch.cat([mix.each.expand(size), mix.mask.expand(1)])
    return mix.keep * torch.eye(size + 1, dtype=FLOAT) + noise


@settings(max_examples=40)
@given(PROCESSES, TIMES, TIMES)
def test_marginals_kernels_and_rates_are_one_chain(process, one, two):
    """Marginals as defined, K_s P_ts = K_t, rows of one, and the rates are the generator's: no negative one, rows of zero."""
    s, t = sorted((one, two))
    size = process.size
    early, late = oracle.marginals(process, scalar(s)), oracle.marginals(process, scalar(t))
    kernel = as_matrix(process.between(scalar(s), scalar(t)), size)
    assert torch.allclose(as_matrix(process.at(scalar(t)), size), late, atol=1e-12)
    assert torch.allclose(early @ kernel, late, atol=1e-12)
    assert torch.allclose(kernel.sum(1), torch.ones(size + 1, dtype=FLOAT), atol=1e-12) and (kernel >= 0).all()
    generator = oracle.generator(process, t)
    here = torch.eye(size + 1, dtype=torch.bool)
    assert torch.allclose(generator.sum(1), torch.zeros(size + 1, dtype=FLOAT), atol=1e-8 / (1 - t))
    assert (generator[~here] >= -1e-9).all()
    to_mask, to_each = process.rates(scalar(t))
    ours = torch.cat([to_each.expand(size), to_mask.expand(1)]).expand(size + 1, -1)
    assert torch.allclose(ours[~here], generator[~here], rtol=1e-6, atol=1e-9)


@given(PROCESSES)
def test_nothing_cancels_at_the_ends(process):
    """Marginals and kernels sum to one, and small quantities keep their digits, down to t = 1e-60 and up to 1 - 2^-53."""
    ends = torch.tensor([1e-60, 1e-30, 1e-12, 1 - 2.0**-53, 1.0], dtype=FLOAT)
    for t in ends:
        for mix in (process.at(t), process.between(torch.zeros_like(t), t), process.between(t * 0.5, t)):
            assert all(bool(torch.isfinite(part)) for part in mix)
            assert float(mix.keep + mix.mask + process.size * mix.each) == pytest.approx(1, abs=1e-12)
    tiny = scalar(1e-30)
    halfway = process.between(tiny / 2, tiny)
    if isinstance(process, Hybrid):
        assert float(halfway.mask) == pytest.approx(5e-31, rel=1e-9)
        expected = process.scale * 1e-30 ** (process.gamma / 2) * (1 - 2 ** (-process.gamma / 2)) / process.size
        assert float(halfway.each) == pytest.approx(expected, rel=1e-6)
    else:
        assert float(halfway.each) == pytest.approx((1 - process.eps) * 5e-31 / process.size, rel=1e-9)


@settings(max_examples=20)
@given(PROCESSES, TIMES, TIMES, st.integers(0, 1000))
def test_posterior_is_bayes(process, one, two, seed):
    s, t = sorted((one, two))
    world = FlatWorld(process, torch.ones((process.size,) * 2))
    states = [z for z in world.states if isinstance(process, Hybrid) or process.size not in z]
    predict = softmax(arbitrary(process.size, seed))
    for state in states[:: 3]:
        p = predict(state, t)
        ours = posterior(process, torch.tensor(state), p, scalar(s).expand(2), scalar(t).expand(2))
        if s < t:
            assert torch.allclose(ours, world.bayes_rows(predict)(state, t, s), atol=1e-7)
        assert torch.allclose(ours.sum(1), torch.ones(2, dtype=FLOAT), atol=1e-12)


@pytest.mark.parametrize("process", [Hybrid(4), Hybrid(4, 0.3), Uniform(4)])
def test_states_are_drawn_from_the_marginals(process):
    rows, draws = 4000, Draws(1, 0, "corrupt", torch.arange(4000))
    for t in (0.05, 0.6, 0.98):
        state = corrupt(process, torch.full((rows,), t, dtype=FLOAT), torch.full((rows, 3), 2), draws.uniform("kind", 3),
                        draws.uniform("token", 3))
        assert within_five_sigma(torch.bincount(state.flatten(), minlength=5), oracle.marginals(process, scalar(t))[2])


@pytest.mark.parametrize("process", [Hybrid(50), Hybrid(50, 0.1), Hybrid(50, 0.1, 0.5), Hybrid(50, 0.1, 2.0), Uniform(50)])
def test_times_come_from_their_density(process):
    """Divided by its density, every stretch of time counts as long as it is; u at both ends stays inside (0, 1)."""
    time, density = process.times((torch.arange(400_000, dtype=FLOAT) + 0.5) / 400_000)
    for low, high in ((0.0, 1e-4), (1e-4, 1e-2), (1e-2, 0.2), (0.2, 0.9), (0.9, 0.999), (0.999, 1.0)):
        length = float((((time > low) & (time <= high)) / density).mean())
        assert length == pytest.approx(high - low, rel=1e-3, abs=1e-5)
    ends = torch.tensor([2.0**-54, 0.25, 0.25 + 2.0**-54, 0.5, 1 - 2.0**-53], dtype=FLOAT)
    t, density = process.times(ends)
    assert ((t > 0) & (t < 1)).all() and torch.isfinite(density).all() and (density >= 0.5).all()


@settings(max_examples=8)
@given(HYBRIDS, st.integers(0, 1000), st.data())
def test_exact_gidd_attains_minus_log_p(process, seed, data):
    """The exact denoiser is p(x_i | z_-i); with it the bound is -log p(x), for the oracle and for the product."""
    length = data.draw(st.integers(1, 2 if process.size < 4 else 1))
    world = FlatWorld(process, distribution(process.size, length, seed))
    x = tuple(data.draw(st.integers(0, process.size - 1)) for _ in range(length))
    truth = -math.log(float(world.joint[x]))
    assert world.bound(x, world.exact_ratios, 1 / 8) == pytest.approx(truth, abs=1e-8)
    method = GiddMethod(p_uniform=process.p_uniform, gamma=process.gamma)
    model = Table(lambda state, t: world.leave_one_out(state, t).log())
    assert integrate(objective(method, process.size), model, world, x) == pytest.approx(truth, abs=1e-8)


@settings(max_examples=6)
@given(HYBRIDS, st.integers(0, 1000))
def test_any_denoiser_costs_what_the_oracle_says(process, seed):
    size = process.size
    world = FlatWorld(process, distribution(size, 2, seed))
    predict = arbitrary(size, seed)
    target = objective(GiddMethod(p_uniform=process.p_uniform, gamma=process.gamma, weighting="none"), size)
    ours = integrate(target, Table(predict), world, (0, size - 1))
    assert ours == pytest.approx(world.bound((0, size - 1), world.ratios_of(softmax(predict)), 1 / 8), abs=1e-8)


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
@pytest.mark.parametrize("length", [1, 2])
def test_exact_sedd_attains_minus_log_p(graph, length):
    """On the uniform graph up to what ending at sigma = -log(eps) costs: E log(q_1 / uniform), enumerated here."""
    method = SeddMethod(graph=graph)
    target = objective(method, 3)
    world = FlatWorld(target.process, distribution(3, length, 5))
    for x in ((0,), (2,)) if length == 1 else ((0, 2), (1, 1)):
        truth = -math.log(float(world.joint[x]))
        if graph == "uniform":
            K, end = world.at(1.0), world.noisy(1.0)
            truth += sum(math.prod(float(K[a, z]) for a, z in zip(x, state)) * math.log(float(end[state]) * 3**length)
                         for state in itertools.product(range(3), repeat=length))
        assert integrate(target, Table(to_raw(world)), world, x) == pytest.approx(truth, abs=1e-8)


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_score_costs_what_the_oracle_says(graph, seed):
    target = objective(SeddMethod(graph=graph), 3)
    world = FlatWorld(target.process, distribution(3, 2, seed))
    predict = arbitrary(3, seed)
    prior = 0.0
    if graph == "uniform":
        last = world.at(1.0)[0, :3]
        prior = 2 * float((last * torch.log(last * 3)).sum())
        assert target.process.prior() == pytest.approx(prior / 2, rel=1e-12)
    ours = integrate(target, Table(predict), world, (2, 0))
    assert ours == pytest.approx(world.bound((2, 0), ratios_from(target.process, predict), 1 / 8) + prior, abs=1e-8)


METHODS = [GiddMethod(p_uniform=0.0), GiddMethod(p_uniform=0.2), SeddMethod(), SeddMethod(graph="uniform")]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_network_publishes_less_than_the_entropy(method, seed):
    """E_x bound >= H(X) for arbitrary answers, and not far above it for those that are right about a world close by."""
    target = objective(method, 3)
    world = FlatWorld(target.process, distribution(3, 1, seed))
    entropy = -float((world.joint * world.joint.log()).sum())
    near = FlatWorld(target.process, world.joint + 0.02)
    exact = (lambda s, t: near.leave_one_out(s, t).log()) if isinstance(method, GiddMethod) else to_raw(near)
    for predict, slack in ((arbitrary(3, seed), None), (exact, 0.05)):
        mean = sum(float(p) * integrate(target, Table(predict), world, x) for x, p in zip(world.sequences, world.joint.flatten()))
        assert mean >= entropy - 1e-9
        assert slack is None or mean < entropy + slack, "an almost right network is almost there"


def test_without_uniform_noise_gidd_and_normalised_absorbing_scores_are_masked_diffusion():
    """At any given states the same number as the tree objective on the star tree, and the limit of small noise is 0's."""
    size, B = 5, 40
    tree = Tree.star(size)
    draws = Draws(3, 0, "states", torch.arange(B))
    tokens = torch.randint(0, size, (B, 4), generator=torch.Generator().manual_seed(1))
    time = draws.uniform("t")
    state = corrupt(Hybrid(size), time, tokens, draws.uniform("kind", 4), draws.uniform("token", 4))
    model = Table(lambda z, t: arbitrary(size, 3)(z, t).log_softmax(-1) + math.log(size))
    mask = (state == size).long()
    ones, weight = torch.zeros_like(tokens[:, 0]), (1 / time)[:, None]
    moment = Moment(time, ones, torch.stack([1 - time, time], 1), weight, weight)
    truth = TreeMethod(process=Cascade(), clip=None).objective(tree, None).score(model, tokens, mask, moment)
    for method in (GiddMethod(p_uniform=0.0, weighting="none"), SeddMethod()):
        ours = objective(method, size).score(model, tokens, state, time, torch.ones_like(time))
        assert torch.allclose(ours.bound, truth.bound, rtol=1e-10)
        trains = time >= 1e-3
        assert trains.all() and float(ours.train) == pytest.approx(float(truth.train), rel=2e-3)
    world = FlatWorld(Hybrid(3), distribution(3, 2, 1))
    little = FlatWorld(Hybrid(3, 1e-7), world.joint)
    values = [integrate(objective(GiddMethod(p_uniform=p), 3), Table(arbitrary(3, 1)), w, (0, 1))
              for p, w in ((0.0, world), (1e-7, little))]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_draws_are_unbiased_and_calm(method):
    """The mean over drawn times and states is the integral; no draw is far out: the standard deviation stays near the mean."""
    target = objective(method, 3)
    world = FlatWorld(target.process, distribution(3, 2, 4))
    model = Table(arbitrary(3, 2))
    rows = 6000
    tokens = torch.tensor([[0, 2]]).expand(rows, -1)
    loss = target.loss(model, tokens, draws=Draws(8, 0, "mean", torch.arange(rows)))
    truth = integrate(target, model, world, (0, 2))
    assert abs(float(loss.bound.mean()) - truth) < 5 * float(loss.bound.std()) / math.sqrt(rows)
    assert float(loss.bound.std()) < 3.5 * truth  # two positions only; the more, the calmer


@pytest.mark.parametrize("method", [*METHODS, GiddMethod(p_uniform=0.2, gamma=0.5)], ids=str)
def test_the_variance_of_the_bound_is_finite(method):
    """Its second moment is an integral over the draw u of the time, and the smallest u (the smallest t) do not carry it."""
    target = objective(method, 3)
    edges = torch.logspace(-16, math.log10(0.999), 400, dtype=FLOAT)
    width, (time, density) = edges.diff(), target.process.times((edges[1:] + edges[:-1]) / 2)
    second = torch.zeros(len(time), dtype=FLOAT)
    for z in range(4 if isinstance(target.process, Hybrid) else 3):
        chance = torch.stack([oracle.marginals(target.process, t)[1, z] for t in time])
        state = torch.full((len(time), 1), z)
        bound = target.score(Table(arbitrary(3, 5)), torch.ones_like(state), state, time, density).bound
        second += torch.where(chance > 0, chance * bound**2, 0.0)
    early = edges[1:] < 1e-6
    assert float((second * width)[early].sum()) < 0.01 * float((second * width).sum())


@pytest.mark.parametrize("method", [GiddMethod(p_uniform=0.2), GiddMethod(p_uniform=0.2, weighting="clip"), SeddMethod(),
                                    SeddMethod(graph="uniform")], ids=str)
def test_training_expects_what_the_original_expects(method):
    """The train loss over our draws equals the original's: times uniform in its window, its weights, the mean over positions."""
    target = objective(method, 3)
    rows, fixed = 8_000, arbitrary(3, 2)
    model = Table(lambda state, t: fixed(state, 0.0))
    tokens = torch.tensor([[0, 2]]).expand(rows, -1)
    draws = Draws(8, 0, "train", torch.arange(rows))
    low, high = (1e-4, 1 - 1e-4) if isinstance(method, GiddMethod) else (1e-3, 1.0)
    uniform = low + (high - low) * draws.strata("their time")
    state = corrupt(target.process, uniform, tokens, draws.uniform("k", 2), draws.uniform("w", 2))

    def mean(time: Tensor, density: Tensor, state: Tensor) -> tuple[float, float]:
        parts = [float(target.score(model, tokens[i: i + 200], state[i: i + 200], time[i: i + 200], density[i: i + 200]).train)
                 for i in range(0, rows, 200)]
        values = torch.tensor(parts)
        return float(values.mean()), float(values.std() / math.sqrt(len(values)))

    theirs, error = mean(uniform, torch.full_like(uniform, 1 / (high - low)), state)
    time, density = target.process.times(draws.strata("time"))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    state = corrupt(target.process, time, tokens, draws.uniform("kind", 2), draws.uniform("token", 2))
    ours, own = mean(time[order], density[order], state[order])
    assert abs(ours - theirs) < 5 * math.hypot(error, own)
    assert error < 0.1 * theirs, "a test that says something"


@pytest.mark.parametrize("method", [*METHODS, GiddMethod(p_uniform=0.2, weighting="none"), GiddMethod(p_uniform=1e-9, gamma=2.0)],
                         ids=str)
def test_both_ends_of_time_are_finite(method):
    """Every state at t = 1e-48 and 1 - 2^-53, a sure and an unsure network in float32: numbers, and gradients, are finite."""
    target = objective(method, 4)
    process = target.process
    states = torch.tensor([s for s in itertools.product(range(5), repeat=2)
                           if isinstance(process, Hybrid) or 4 not in s])
    if isinstance(process, Hybrid) and not process.p_uniform:
        states = states[((states == 4) | (states == torch.tensor([1, 3]))).all(1)]
    for t in (1e-48, 1e-20, 1 - 2.0**-53):
        time = torch.full((len(states),), t, dtype=FLOAT)
        for scale in (0.0, 1.0, 20.0):
            raw = (torch.randn(len(states), 2, 4, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_(True)
            model = Table(arbitrary(4, 0))
            model.hidden = lambda nodes, time, level, raw=raw: raw
            loss = target.score(model, torch.tensor([1, 3]).expand_as(states), states, time, torch.ones_like(time))
            assert torch.isfinite(loss.bound).all() and (loss.bound >= -1e-3 * loss.bound.abs().max() - 1e-6).all()
            divergence = target.score(model, torch.tensor([1, 3]).expand_as(states), states, time.clamp(2e-3, 1 - 2e-4),
                                      torch.ones_like(time)).train
            for value in (loss.train, divergence):
                (grad,) = torch.autograd.grad(value, raw, retain_graph=True)
                assert torch.isfinite(grad).all()


@pytest.mark.parametrize("method", [GiddMethod(p_uniform=0.2), SeddMethod(), SeddMethod(graph="uniform")], ids=str)
def test_sums_over_the_vocabulary_may_be_cut_in_parts(method, monkeypatch):
    """Recomputed in parts of five positions, the loss and its gradient stay what they were."""
    target, answers = objective(method, 4), []
    for limit in (wide.LIMIT, 20):
        monkeypatch.setattr(wide, "LIMIT", limit)
        raw = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0), dtype=FLOAT, requires_grad=True)
        model = Table(arbitrary(4, 0))
        model.hidden = lambda nodes, time, level, raw=raw: raw
        tokens = torch.arange(48).view(8, 6) % 4
        loss = target.loss(model, tokens, draws=Draws(0, 0, "parts", torch.arange(8)))
        answers.append((loss.train.detach(), loss.bound, *torch.autograd.grad(loss.train, raw)))
    for one, other in zip(*answers):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("kind", [Shared(), Tied()])
@pytest.mark.parametrize("pad", ["count", "given-length", "drop"])
def test_a_wide_head_makes_gidds_gradients_with_its_logits(kind, pad, monkeypatch):
    """Some positions at a time, in float64: loss, bound and all gradients are those of a head whose logits are kept."""
    monkeypatch.setattr(linear_ce, "BLOCK_BYTES", 64 * 8 * 16)
    monkeypatch.setattr(linear_ce, "ALIGNED", 8)
    tree, generator = Tree.star(13), torch.Generator().manual_seed(0)
    target = GiddMethod(p_uniform=0.2).objective(tree, 12).with_pad(pad)
    embedding = torch.nn.Embedding(tree.nodes + 2, 6, dtype=FLOAT)
    head = kind.build(tree, embedding, None).double()
    for parameter in (embedding.weight, *head.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=FLOAT)
    raw = torch.randn(8, 6, 6, generator=generator, dtype=FLOAT, requires_grad=True)
    model: Any = SimpleNamespace(head=head, told_time=True, hidden=lambda nodes, time, level: raw)
    tokens, answers = torch.randint(0, 13, (8, 6), generator=generator), []
    head.cheap = False
    for limit in (wide.LIMIT, 20):
        monkeypatch.setattr(wide, "LIMIT", limit)
        loss = target.loss(model, tokens, draws=Draws(0, 0, "wide", torch.arange(8)))
        leaves = [raw, embedding.weight if isinstance(kind, Tied) else raw, *head.parameters()]
        answers.append((loss.train.detach(), loss.bound, *torch.autograd.grad(3 * loss.train, leaves)))
        with torch.no_grad():
            assert torch.allclose(target.loss(model, tokens, draws=Draws(0, 0, "wide", torch.arange(8))).bound, loss.bound)
    for one, other in zip(*answers, strict=True):
        assert bool(one.any()) and torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_without_uniform_noise_a_head_that_makes_its_gradients_at_once_may_do_so():
    """p_uniform = 0 is a weighted cross-entropy, whose logits a wide head need not keep; the loss is that of any other head."""
    target, tokens, asked = objective(GiddMethod(p_uniform=0.0), 4), torch.arange(48).view(8, 6) % 4, []

    class Fused(RawHead):
        def weighted(self, hidden, parent, slot, share):
            asked.append((parent, share))
            nll = self.nll(hidden, parent, slot)
            return (nll * share).sum(), nll.detach()

    model, fused = (Table(arbitrary(4, 0)) for _ in range(2))
    fused.head = Fused()
    one, other = (target.loss(network, tokens, draws=Draws(0, 0, "fused", torch.arange(8))) for network in (model, fused))
    assert torch.equal(one.train, other.train) and torch.equal(one.bound, other.bound) and one.bound.sum() > 0
    ((parent, share),) = asked
    assert (parent == target.tree.root).all() and (share > 0).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_pad_modes(method):
    """given-length: PAD is always seen and never scored, and the bound is -log p(x | length); drop leaves its terms out."""
    size, pad_id = 4, 3
    target = objective(method, size, pad_id)
    conditional = distribution(size, 1, 3)
    conditional[pad_id] = 1e-12
    world = FlatWorld(target.process, conditional)
    exact = (lambda s, t: world.leave_one_out(s, t).log()) if isinstance(method, GiddMethod) else to_raw(world)

    def first(state: tuple[int, ...], t: float) -> Tensor:
        assert state[1] == pad_id, "PAD is visible under given-length"
        return torch.cat([exact(state[:1], t), torch.zeros(1, size, dtype=FLOAT)])

    rows = 4000
    tokens = torch.tensor([[1, pad_id]]).expand(rows, -1)
    draws = Draws(1, 0, "pad", torch.arange(rows))
    given = target.with_pad("given-length").loss(Table(first), tokens, draws=draws)
    error = float(given.bound.std()) / math.sqrt(rows)
    truth = integrate(objective(method, size), Table(exact), world, (1,))
    assert abs(float(given.bound.mean()) - truth) < 5 * error
    assert given.parts["tokens"].tolist() == [1] * rows
    predict = arbitrary(size, 1)
    count, drop = (target.with_pad(mode).loss(Table(predict), tokens, draws=draws) for mode in ("count", "drop"))
    assert (drop.bound <= count.bound + 1e-12).all() and float(drop.bound.mean()) < float(count.bound.mean()) - 0.1
    assert torch.equal(drop.train, count.train), "training counts PAD"
    assert target.is_bound and not target.with_pad("drop").is_bound


def test_what_cannot_be_asked():
    bad: dict[str, Any]
    for bad in ({"p_uniform": 1.0}, {"p_uniform": -0.1}, {"gamma": 2.5}, {"gamma": 0.1}, {"clip": 0.0}):
        with pytest.raises(ConfigError, match="must"):
            GiddMethod(**bad)
    for bad in ({"eps": 0.0}, {"eps": 0.1}):
        with pytest.raises(ConfigError, match="eps"):
            SeddMethod(**bad)
    with pytest.raises(ConfigError, match="no effect"):
        GiddMethod(weighting="none", clip=3.0)
    tree = Tree.from_nested([[0, 1], [2, 3]])
    for method in (GiddMethod(), SeddMethod()):
        with pytest.raises(TreeError, match="star"):
            method.objective(tree, None)

    class Normalised(Table):
        head = type("OnlyProbabilities", (), {})()

    with pytest.raises(ConfigError, match="OnlyProbabilities has no logits"):
        objective(SeddMethod(), 3).loss(Normalised(arbitrary(3, 0)), torch.zeros(2, 2, dtype=torch.int64),
                                        draws=Draws(0, 0, "x", torch.arange(2)))
