"""The joint head: a distribution over possible combinations only, equal to a slow twin that lists them."""
from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import ConfigError
from tdlm.model.joint import JointHead, combinations, marginals, own_slots, sum_out
from tdlm.tree import Tree
from tests.worlds import trees

WIDTH, ASKED = 6, 9


def shaken(tree: Tree, length: int, combine) -> JointHead:
    head = JointHead(tree, WIDTH, length, combine)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def questions(tree: Tree, length: int, seed: int = 0):
    """Hidden states, nodes of any kind (-1: missing) and known slots; every row has something open."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.randint(0, tree.nodes, (ASKED, length), generator=generator)
    parent[:, 0] = tree.root
    parent[-1, 1:] = -1
    known = own_slots(tree)[parent.clamp(min=0)].masked_fill(parent < 0, 0)
    open_ = (tree.num_children[parent.clamp(min=0)] > 1) & (torch.rand(ASKED, length, generator=generator) < 0.7) & (parent >= 0)
    open_[:, 0] = True
    hidden = torch.randn(ASKED, length, WIDTH, generator=generator).masked_fill((parent < 0)[..., None], 0)
    return hidden, parent, known.masked_fill(open_, -1)


@settings(max_examples=25)
@given(trees(), st.integers(1, 3), st.sampled_from(["concat", "mean"]))
def test_it_equals_its_slow_twin(tree, length, combine):
    """Combination by combination with plain indexing: logits, masks, normalisation, marginals, sums."""
    head = shaken(tree, length, combine).double()
    hidden, parent, known = questions(tree, length)
    hidden = hidden.double()
    log_probs = head.log_probs(hidden, parent, known).detach()
    each = marginals(log_probs, tree.branching, length)
    gone = torch.rand(ASKED, length, generator=torch.Generator().manual_seed(1)) < 0.5
    rest = sum_out(log_probs, gone, tree.branching)
    for m in range(ASKED):
        state = hidden[m].flatten() if combine == "concat" else hidden[m, parent[m] >= 0].mean(0)
        logits = (head.output.weight @ state + head.output.bias).tolist()
        choices = [range(int(tree.num_children[parent[m, i]])) if known[m, i] < 0 else [int(known[m, i])] for i in range(length)]
        possible = {combination: logits[number]
                    for number, combination in enumerate(itertools.product(range(tree.branching), repeat=length))
                    if all(k in choice for k, choice in zip(combination, choices))}
        total = torch.logsumexp(torch.tensor(list(possible.values()), dtype=torch.float64), 0)
        p = {combination: float(torch.exp(logit - total)) for combination, logit in possible.items()}
        for number, combination in enumerate(itertools.product(range(tree.branching), repeat=length)):
            assert float(log_probs[m, number].exp()) == pytest.approx(p.get(combination, 0.0), abs=1e-12)
        for place, slot in itertools.product(range(length), range(tree.branching)):
            share = sum(q for combination, q in p.items() if combination[place] == slot)
            assert float(each[m, place, slot].exp()) == pytest.approx(share, abs=1e-12)
        for number, combination in enumerate(itertools.product(range(tree.branching), repeat=length)):
            same = [q for other, q in p.items() if all(gone[m, i] or other[i] == combination[i] for i in range(length))]
            share = 0.0 if any(gone[m, i] and combination[i] for i in range(length)) else sum(same)
            assert float(rest[m, number].exp()) == pytest.approx(share, abs=1e-12)


@settings(max_examples=20)
@given(trees(), st.integers(1, 3))
def test_loss_and_gradients(tree, length):
    """nll is -log p of the class, classes are digits, and no gradient is lost in impossible combinations."""
    head = shaken(tree, length, "concat")
    hidden, parent, known = questions(tree, length)
    hidden.requires_grad_()
    slots = torch.where(known >= 0, known, tree.num_children[parent.clamp(min=0)] - 1)
    code = head.code(slots)
    assert torch.equal(head.slots(code), slots)
    every = torch.arange(head.outcomes)
    assert torch.equal(head.code(head.slots(every)), every)
    nll = head.nll(hidden, parent, known, slots)
    assert torch.allclose(nll, -head.log_probs(hidden, parent, known).gather(1, code[:, None])[:, 0], atol=1e-6)
    nll.sum().backward()
    assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in head.parameters() if p.grad is not None)


@settings(max_examples=20)
@given(trees())
def test_own_slots_are_the_slots_among_the_parents_children(tree):
    own = own_slots(tree)
    for row in range(tree.nodes - tree.size):
        for slot in range(int(tree.num_children[tree.size + row])):
            assert int(own[tree.children[row, slot]]) == slot
    assert int(own[tree.root]) == 0


def test_a_fresh_head_knows_nothing_and_sizes_are_stated():
    tree = Tree.from_nested([[0, 1], [2, [3, 4]]])
    head = JointHead(tree, 8, 4)
    assert (head.outcomes, head.branching, head.flops) == (16, 4, 2 * 32 * 16 // 4)
    assert sum(p.numel() for p in head.parameters()) == 32 * 16 + 16
    assert sum(p.numel() for p in JointHead(tree, 8, 4, "mean").parameters()) == 8 * 16 + 16
    parent = torch.full((1, 4), tree.root)
    fresh = head.log_probs(torch.randn(1, 4, 8), parent, torch.full((1, 4), -1))
    assert torch.allclose(fresh.exp(), torch.full((1, 16), 1 / 16))


def test_too_many_combinations_are_an_error_that_says_what_fits():
    assert combinations(2, 16) == 65_536 and combinations(2, 20) == 2**20
    with pytest.raises(ConfigError, match="at most 6"):
        combinations(8, 7)
    with pytest.raises(ConfigError, match="at most 2"):
        combinations(512, 4)
