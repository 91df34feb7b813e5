"""Forward processes against the oracle's matrices: rows, Chapman-Kolmogorov, marginals, reverse kernels, backward rates."""
from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import ConfigError
from tdlm.process import Cascade, Cosine, Linear, Overlapping, Polynomial, corrupt, draw_heights
from tdlm.process.oracle import Chain, alpha, legendre, rate_times_occupancy
from tests.worlds import distribution, processes, trees

FLOAT = torch.float64
TIMES = st.floats(0.02, 0.98)


@settings(max_examples=40)
@given(trees(), processes(), TIMES, TIMES)
def test_rows_of_q_sum_to_zero_and_of_p_to_one(tree, process, s, t):
    s, t = sorted((s, t))
    chain = Chain(tree, process)
    assert chain.generator(0.5 * (s + t)).sum(1).abs().max() < 1e-6
    assert (chain.cumulative(s, t).sum(1) - 1).abs().max() < 1e-12


@settings(max_examples=40)
@given(trees(), processes(), st.lists(TIMES, min_size=3, max_size=3, unique=True))
def test_chapman_kolmogorov_within_and_across_levels(tree, process, times):
    r, s, t = sorted(times)
    chain = Chain(tree, process)
    error = chain.cumulative(r, s) @ chain.cumulative(s, t) - chain.cumulative(r, t)
    assert error.abs().max() < 1e-10  # matrix exponentials are good to about 1e-11


@settings(max_examples=30)
@given(trees(), processes(), st.floats(0.05, 0.95))
def test_kolmogorov_forward_equation(tree, process, t):
    """dP/dt = P Q_t (rows are 'from'), by a central difference away from the thresholds, where Q_t is singular."""
    edges = process.edges(tree.height) if isinstance(process, Cascade) else [0.0, 1.0]
    if min(abs(t - edge) for edge in edges) < 0.02:
        return
    chain, step = Chain(tree, process), 1e-4
    start = max(edge for edge in edges if edge <= t) + 0.01
    slope = (chain.cumulative(start, t + step) - chain.cumulative(start, t - step)) / (2 * step)
    expected = chain.cumulative(start, t) @ chain.generator(t)
    assert (slope - expected).abs().max() < 2e-4 * (1 + expected.abs().max())


@settings(max_examples=40)
@given(trees(), processes(), TIMES)
def test_occupancy_is_the_marginal_of_the_generator(tree, process, t):
    chain = Chain(tree, process)
    occupancy = process.occupancy(torch.tensor(t, dtype=FLOAT), tree.height)
    for token, row in enumerate(chain.marginal(t)):
        expected = torch.zeros_like(row)
        for height in range(tree.height + 1):
            expected[chain.index[(height, int(tree.ancestor[height, token]))]] = occupancy[height]
        assert (row - expected).abs().max() < 1e-10


@settings(max_examples=30)
@given(trees(), processes(), TIMES, TIMES, st.integers(0, 1000))
def test_reverse_kernel_is_bayes_rule(tree, process, s, t, seed):
    """height at s given height at t, times the exact posterior over children: the oracle's p(z_s | z_t)."""
    s, t = sorted((s, t))
    if t - s < 1e-3:
        return
    prior = distribution(tree.size, 1, seed)
    prior = prior / prior.sum()
    chain = Chain(tree, process)
    expected = chain.reverse(s, t, prior)
    kernel = torch.eye(tree.height + 1, dtype=FLOAT)
    for later, earlier in process.segments(t, s, tree.height):
        kernel = kernel @ process.reverse(later, earlier, tree.height)
    reachable = prior @ chain.marginal(t)
    mass = tree.mass(prior)
    for row, (height, node) in enumerate(chain.places):
        if reachable[row] < 1e-12:
            continue
        for column, (lower, other) in enumerate(chain.places):
            tokens = (tree.ancestor[height] == node) & (tree.ancestor[lower] == other)
            share = prior[tokens].sum() / mass[node]
            assert abs(float(kernel[height, lower] * share - expected[row, column])) < 1e-9


@settings(max_examples=15)
@given(trees(max_leaves=5), processes(), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_general_continuous_time_bound_equals_the_closed_form(tree, process, t, seed):
    """Lemma (Prop. H.4 of GIDD) with hat Q against weight x cross-entropy: equal in expectation over z at every t."""
    if isinstance(process, Cascade) and min(abs(t - e) for e in process.edges(tree.height)) < 0.02:
        return
    chain, H = Chain(tree, process), tree.height
    generator = torch.Generator().manual_seed(seed)
    occupancy = process.occupancy(torch.tensor(t, dtype=FLOAT), H)
    for token in range(tree.size):
        general = closed = 0.0
        for height in range(H + 1):
            place = (height, int(tree.ancestor[height, token]))
            if occupancy[height] < 1e-14:
                continue
            kids = int(tree.num_children[place[1]])
            p = torch.rand(kids, generator=generator, dtype=FLOAT) + 0.1
            p = p / p.sum()
            general += float(occupancy[height]) * chain.lemma_integrand(place, token, p, t)
            if height:
                slot = int(tree.slot[height - 1, token])
                closed += rate_times_occupancy(process, H, t, height - 1) * math.log(float(p[slot]))
        assert general == pytest.approx(closed, abs=2e-5 * (1 + abs(closed)))


@settings(max_examples=20)
@given(trees(max_leaves=5), processes(), st.floats(0.05, 0.95))
def test_backward_rates_with_the_exact_posterior_reverse_the_chain(tree, process, t):
    """hat Q moves the marginal backwards: q_{t-d} = q_t + d q_t hat Q + O(d^2)."""
    if isinstance(process, Cascade) and min(abs(t - e) for e in process.edges(tree.height)) < 0.02:
        return
    prior = distribution(tree.size, 1, 3)
    prior = prior / prior.sum()
    chain, mass, step = Chain(tree, process), tree.mass(prior), 1e-4
    marginal = prior @ chain.marginal(t)
    flow = torch.zeros_like(marginal)
    for row, (height, node) in enumerate(chain.places):
        if marginal[row] > 1e-14:
            kids = [mass[child] for _, child in chain.children_of((height, node))] if height else [mass[node]]
            p = torch.stack(kids)
            rates = chain.backward_rates((height, node), p / p.sum(), t)
            assert abs(float(rates.sum())) < 1e-9
            flow += marginal[row] * rates
    change = (prior @ chain.marginal(t - step) - prior @ chain.marginal(t + step)) / (2 * step)
    assert (change - flow).abs().max() < 1e-3 * (1 + flow.abs().max())


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Polynomial(2.0), Polynomial(0.5)])
def test_schedules_state_their_own_derivative_and_ends(schedule):
    u = torch.linspace(0.01, 0.99, 50, dtype=FLOAT)
    assert torch.allclose(1 - schedule.moved(u), torch.tensor([alpha(schedule, float(x)) for x in u], dtype=FLOAT), atol=1e-14)
    slope = (schedule.moved(u + 1e-6) - schedule.moved(u - 1e-6)) / 2e-6
    assert torch.allclose(slope, schedule.rate(u), rtol=1e-7)
    ends = schedule.moved(torch.tensor([0.0, 1.0], dtype=FLOAT))
    assert float(ends[0]) == 0.0 and float(ends[1]) == pytest.approx(1.0, abs=1e-15)
    tiny = torch.tensor([1e-12], dtype=FLOAT)
    assert float(schedule.moved(tiny)) > 0, "1 - alpha must survive cancellation"


def test_the_steepest_schedule_has_a_weight_at_the_earliest_time_that_can_be_drawn():
    least = torch.tensor([2.0**-54 / 1024], dtype=FLOAT)
    weight = Cascade(Polynomial(16.0)).moment(least, 1).weight
    assert float(weight * least) == pytest.approx(16.0), "power / u"
    for power in (0.0, 17.0, math.nan):
        with pytest.raises(ConfigError, match="power must lie in"):
            Polynomial(power)


@pytest.mark.parametrize("process", [Cascade(), Cascade(Cosine()), Overlapping()])
@pytest.mark.parametrize("height", [1, 2, 3, 6, 17])
def test_weights_integrate_to_one_per_level(process, height):
    """E over the draw of sum_l weight_l w_{l+1} = H, and one per level: Int lambda_l w_l dt = 1, deep trees included."""
    nodes, weights = legendre(40)
    total = torch.zeros(height, dtype=FLOAT)
    for part in range(300):
        u = torch.tensor([(part + x) / 300 for x in nodes], dtype=FLOAT)
        moment = process.moment(u, height)
        value = moment.weight * moment.occupancy[:, 1:]
        total += (value.nan_to_num(0.0) * torch.tensor(weights, dtype=FLOAT)[:, None]).sum(0) / 300
        assert torch.isfinite(moment.weight[moment.occupancy[:, 1:] > 0]).all()
        assert torch.allclose(moment.occupancy.sum(-1), torch.ones(len(u), dtype=FLOAT))
    assert (total - 1).abs().max() < 2e-3


@pytest.mark.parametrize("height", [4, 16, 20])
def test_deep_overlapping_weights_stay_bounded(height):
    """Drawing s from the mixture of gammas keeps weight x occupancy below H per level; uniform t would not."""
    moment = Overlapping().moment(torch.linspace(1e-9, 1 - 1e-9, 10_001, dtype=FLOAT), height)
    assert float((moment.weight * moment.occupancy[:, 1:]).amax()) <= height + 1e-6


def test_corruption_frequencies_match_the_occupancies():
    for process in (Cascade(), Overlapping()):
        u = torch.full((4,), 0.37, dtype=FLOAT)
        moment = process.moment(u, 3)
        heights = corrupt(moment, torch.rand(4, 50_000, dtype=FLOAT, generator=torch.Generator().manual_seed(0)))
        count = torch.bincount(heights.flatten(), minlength=4).double()
        n, p = heights.numel(), moment.occupancy[0]
        assert ((count - n * p).abs() <= 5 * torch.sqrt(n * p * (1 - p)) + 1e-9).all()


def test_drawn_heights_are_never_impossible():
    p = torch.tensor([[0.0, 0.3, 0.7 - 1e-17, 0.0]], dtype=FLOAT)
    heights = draw_heights(p, torch.tensor([[1e-17, 0.3, 1 - 2**-54]], dtype=FLOAT))
    assert heights.tolist() == [[1, 2, 2]]


def test_both_processes_end_where_they_must():
    for process in (Cascade(), Cascade(Cosine()), Overlapping()):
        for height in (1, 2, 5):
            ends = process.occupancy(torch.tensor([0.0, 1.0], dtype=FLOAT), height)
            assert float(ends[0, 0]) == 1.0 and float(ends[1, height]) == pytest.approx(1.0, abs=1e-15)


def beyond(count: int, s: Fraction) -> Fraction:
    """P(Poisson(s) >= count) / P(Poisson(s) = count), its series in whole numbers."""
    total = term = Fraction(1)
    for k in range(1, 100):
        term *= s / (count + k)
        total += term
    return total


@pytest.mark.parametrize("height", [1, 2, 3, 20, 32, 64])
def test_high_trees_have_finite_weights_at_the_very_beginning(height):
    """u as near to 0 and 1 as the draws come (2^-54 and less): w_{H-1} and w_H are 0 in float64, their ratio is not."""
    u = torch.tensor([2.0**-54 / 4096, 2.0**-54, 1e-9, 1e-4, 0.03, 0.2, 0.5, 0.9, 1 - 2.0**-53], dtype=FLOAT)
    moment = Overlapping().moment(u, height, clip=2.0)
    s = torch.where(u < 0.5 / height, -torch.log1p(-moment.time), -moment.occupancy[:, 0].log())[:-1]  # whichever has digits
    assert bool(moment.weight.isfinite().all()) and bool((moment.weight > 0).all())
    assert bool(((moment.train_weight > 0) & moment.train_weight.isfinite()).all())
    above = moment.weight[:-1, -1] / (moment.weight[:-1, 0] * s if height > 1 else torch.exp(s))  # = w_{H-1} / w_H
    for ratio, x in zip(above.tolist(), s.tolist()):
        expected = height / (Fraction(x) * beyond(height, Fraction(x)))
        assert ratio == pytest.approx(float(expected), rel=1e-8)  # torch's gammainc is good to 1e-9


@pytest.mark.parametrize("height", [3, 20, 32])
def test_every_level_of_a_high_tree_weighs_one(height):
    """E_u[weight_l w_{l+1}] is the integral of w_l over s, which is 1: what makes the bound unbiased. The first points of the
    rule stand where the weights were not numbers."""
    points, shares = (torch.tensor(values, dtype=FLOAT) for values in legendre(400))
    u = torch.cat([torch.tensor([2.0**-60, 2.0**-54], dtype=FLOAT), points])
    moment = Overlapping().moment(u, height)
    parts = moment.weight * moment.occupancy[:, 1:]
    assert bool(parts.isfinite().all())
    assert (shares @ parts[2:] - 1).abs().max() < 2e-3


@pytest.mark.parametrize("height", [1, 2, 8, 24, 40])
@pytest.mark.parametrize("later, earlier", [(1e-15, 4e-16), (1e-6, 1e-6), (1e-3, 0.0), (0.4, 0.1), (0.9, 0.9), (1 - 1e-9, 0.5)])
def test_the_reverse_of_a_high_tree_divides_nothing_small(height, later, earlier):
    """Rows sum to one and lead from the law at `later` to that at `earlier`, where these are numbers."""
    process = Overlapping()
    kernel = process.reverse(later, earlier, height)
    assert bool((kernel >= 0).all()) and (kernel.sum(1) - 1).abs().max() < 1e-8
    before, after = (process.occupancy(torch.tensor(t, dtype=FLOAT), height) for t in (later, earlier))
    assert (before @ kernel - after).abs().max() < 1e-8  # torch's gammainc is good to 1e-9
    assert torch.allclose(process.reverse(1.0, earlier, height)[height], after, atol=1e-15)
