"""The dense head: equal to its definition on any tree, to the shared head on the star, and as cheap as it says."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.model import Dense, DenseHead, SharedHead
from tdlm.model.dense import leaf_order, stretches
from tdlm.tree import Tree
from tests.worlds import trees

WIDTH, ROWS = 8, 24


def shaken(tree: Tree, tied: bool, dtype: torch.dtype = torch.float64) -> tuple[DenseHead, torch.Tensor]:
    """A head and its output matrix, with random numbers."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.Embedding(tree.nodes + 3, WIDTH, dtype=dtype)
    head = Dense(tied).build(tree, embedding, None).to(dtype)
    for parameter in (embedding.weight, *head.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return head, embedding.weight if tied else head.weight


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def question(tree: Tree, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, inner nodes in no order and one of their slots each."""
    generator = torch.Generator().manual_seed(1)
    parent = torch.randint(tree.size, tree.nodes, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, parent, torch.arange(ROWS) % tree.num_children[parent]


def below(tree: Tree, node: int) -> list[int]:
    return (tree.ancestor == node).any(0).nonzero()[:, 0].tolist()


@settings(max_examples=25)
@given(trees())
def test_every_node_is_one_stretch_of_the_leaf_order(tree):
    order = leaf_order(tree)
    first, end = stretches(tree, order)
    for node in range(tree.nodes):
        assert sorted(order[first[node]:end[node]].tolist()) == below(tree, node)
    for node in range(tree.size, tree.nodes):  # and the children follow one another in slot order
        kids = tree.children[node - tree.size, : tree.num_children[node]]
        assert first[kids].tolist() == [int(first[node]), *end[kids][:-1].tolist()] and end[kids[-1]] == end[node]


@settings(max_examples=25)
@given(trees(), st.booleans())
def test_it_is_its_definition(tree, tied):
    """One position at a time with plain indexing of the tokens below each child: same values, same gradients."""
    head, matrix = shaken(tree, tied)
    hidden, parent, slot = question(tree, torch.float64)
    slow = torch.full((ROWS, tree.branching), -torch.inf, dtype=torch.float64)
    logits = hidden @ matrix[: tree.size].T + head.bias
    for row, node in enumerate(parent.tolist()):
        for k in range(int(tree.num_children[node])):
            kid = int(tree.children[node - tree.size, k])
            slow[row, k] = logits[row, below(tree, kid)].logsumexp(0) - logits[row, below(tree, node)].logsumexp(0)
    fast, nll = head.log_probs(hidden, parent), head.nll(hidden, parent, slot)
    expected = -slow.gather(1, slot[:, None])[:, 0]
    assert close(fast, slow) and close(nll, expected) and close(head.token_log_probs(hidden), logits.log_softmax(-1))
    known = [hidden, matrix, head.bias]
    wanted = torch.autograd.grad(expected.sum(), known, retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(nll.sum(), known), wanted):
        assert close(ours, theirs)


def test_on_the_star_tree_it_is_the_shared_head():
    tree = Tree.star(9)
    dense, shared = DenseHead(tree, WIDTH), SharedHead(tree, WIDTH)
    for ours, theirs in ((dense.weight, shared.output.weight), (dense.bias, shared.output.bias)):
        assert ours.shape == theirs.shape and not bool(ours.any()) and not bool(theirs.any()), "both start at zero"
        theirs.data = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
        ours.data = theirs.data.clone()
    hidden, parent, _ = question(tree, torch.float32)
    slot = torch.arange(ROWS) % 9
    assert torch.allclose(dense.log_probs(hidden, parent), shared.log_probs(hidden, parent), atol=1e-6)
    assert torch.allclose(dense.nll(hidden, parent, slot), shared.nll(hidden, parent, slot), atol=1e-6)


def test_a_tied_head_starts_as_the_unigram_model_at_every_height():
    tree = Tree.from_nested([[0, 1], [2, [3, 4]]])
    mass = tree.mass(torch.tensor([50.5, 7.5, 0.5, 30.5, 3.5], dtype=torch.float64))
    embedding = torch.nn.Embedding(tree.nodes, WIDTH)
    embedding.weight.data.zero_()
    head = Dense(tied=True).build(tree, embedding, mass)
    for node in range(tree.size, tree.nodes):
        kids = tree.children[node - tree.size, : tree.num_children[node]]
        log_probs = head.log_probs(torch.randn(1, WIDTH), torch.tensor([node]))[0, : len(kids)]
        assert torch.allclose(log_probs.exp(), (mass[kids] / mass[node]).float(), atol=1e-6)
    assert [name for name, _ in head.named_parameters()] == ["bias"], "the backbone owns the matrix"
    untied = Dense().build(tree, embedding, mass)
    assert not any(bool(parameter.any()) for parameter in untied.parameters())


def test_an_improbable_child_has_a_finite_cost_and_gradient():
    """A stretch 200 nats below the rest underflows as a sum of exponentials; as a log-sum-exp of its own it does not."""
    tree = Tree.from_nested([[0, 1], [2, 3]])
    head = DenseHead(tree, 1)
    head.bias.data = torch.tensor([0.0, 0.0, -200.0, -201.0])
    cost = head.nll(torch.zeros(1, 1), torch.tensor([tree.root]), torch.tensor([1]))
    assert cost.item() == pytest.approx(200.0 + 0.6931 - 0.3133, abs=1e-3)
    gradient, = torch.autograd.grad(cost.sum(), head.bias)
    assert torch.allclose(gradient, torch.tensor([0.5, 0.5, -0.7311, -0.2689]), atol=1e-3)


def test_no_positions_are_no_error():
    tree = Tree.from_nested([[0, 1], [2, 3]])
    head, nothing = DenseHead(tree, WIDTH), torch.empty(0, dtype=torch.int64)
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    assert head.log_probs(hidden, nothing).shape == (0, 2)
    cost = head.nll(hidden, nothing, nothing)
    cost.sum().backward()
    assert cost.shape == (0,) and hidden.grad is not None


def test_half_precision_products_are_summed_in_float32():
    tree = Tree.from_nested([[0, 1], [2, 3]])
    head, _ = shaken(tree, tied=False, dtype=torch.float32)
    hidden, parent, slot = question(tree, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        answer = head.nll(hidden, parent, slot)
    assert answer.dtype == torch.float32
    assert torch.allclose(answer, head.nll(hidden, parent, slot), atol=0.1)
