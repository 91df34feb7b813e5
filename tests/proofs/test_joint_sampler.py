"""Samplers of the joint method: exact with the exact joint posterior, gaps inside a neighbourhood, what the head is told."""
from __future__ import annotations

import pytest
import torch

from tdlm.model.joint import own_slots
from tdlm.objectives import JointMethod, JointObjective
from tdlm.process import Cascade, Cosine, Overlapping
from tdlm.rng import Draws
from tdlm.sample import Choice, Sampled
from tdlm.tree import Tree
from tests.proofs.test_bound import objective as tree_objective
from tests.proofs.test_joint import FLOAT, JointTable, TableHead, assembled, exact_joint, make, random_joint, shake
from tests.proofs.test_sampler import CachedTable, frequencies, within_five_sigma
from tests.worlds import tiny_world


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
