"""Fast paths against their slow twins: values and gradients."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tdlm.model.dense import Dense
from tdlm.model.head import PerLevel, Shared, Tied, takes_all, weighted_nll
from tdlm.model.kernels import grouped, linear_ce
from tdlm.model.kernels.grouped import Groups, grouped_nll
from tdlm.model.kernels.linear_ce import linear_cross_entropy
from tdlm.tree import Tree
from tests.worlds import trees

WIDTH = 16
FLOAT = torch.float64


def states(tree: Tree, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents (tokens among them) and slots of random positions."""
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(0, tree.size, (count,), generator=generator)
    height = torch.randint(0, tree.height + 1, (count,), generator=generator)
    return tree.ancestor[height, token], tree.slot[(height - 1).clamp(min=0), token]


def tied(tree: Tree, dtype: torch.dtype = FLOAT) -> tuple[torch.nn.Module, torch.nn.Embedding]:
    embedding = torch.nn.Embedding(tree.nodes + 3, WIDTH, dtype=dtype)
    head = Tied().build(tree, embedding, None).to(dtype)
    torch.nn.init.normal_(head.bias, generator=torch.Generator().manual_seed(1))
    return head, embedding


def gradients(value: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True))]


@settings(max_examples=30)
@given(trees(), st.integers(0, 1000), st.integers(1, 3))
def test_grouped_products_equal_the_head_group_by_group(tree, seed, most):
    """Also when a level takes several products, and with positions that have nothing to predict among the others."""
    parent, slot = states(tree, 23, seed)
    head, embedding = tied(tree, torch.float32)
    hidden = torch.randn(23, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    share = torch.rand(23, generator=torch.Generator().manual_seed(seed + 1))
    active = tree.num_children[parent] > 1
    before, grouped.MOST_GROUPS = grouped.MOST_GROUPS, most
    try:
        groups = Groups(tree)
        fast = grouped_nll(hidden, parent, slot, embedding.weight, head.bias, groups)
        with torch.no_grad():
            silent = grouped_nll(hidden, parent, slot, embedding.weight, head.bias, groups)
    finally:
        grouped.MOST_GROUPS = before
    assert torch.allclose(silent, fast, atol=2e-5)
    assert not bool(fast[parent < tree.size].any())
    slow = torch.zeros(23).masked_scatter(active, head.nll(hidden[active], parent[active], slot[active]))
    assert torch.allclose(fast[active], slow[active], atol=2e-5)
    if bool(active.any()):
        ours = gradients((fast * share).sum(), hidden, embedding.weight, head.bias)
        theirs = gradients((slow * share).sum(), hidden, embedding.weight, head.bias)
        assert all(torch.allclose(a, b, atol=3e-5) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("classes", [None, 50])
def test_wide_cross_entropy_is_the_plain_one(rows, classes, monkeypatch):
    """Whatever the blocks: values, gradients, padding rows that are no classes."""
    monkeypatch.setattr(linear_ce, "BLOCK_BYTES", 64 * 8 * rows)
    monkeypatch.setattr(linear_ce, "ALIGNED", 8)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, WIDTH, dtype=FLOAT, generator=generator, requires_grad=True) for size in (33, 61))
    bias = torch.randn(61, dtype=FLOAT, generator=generator, requires_grad=True)
    target, share = torch.randint(0, 50, (33,), generator=generator), torch.rand(33, dtype=FLOAT, generator=generator)
    total, nll = linear_cross_entropy(hidden, weight, bias, target, share, classes)
    plain = F.cross_entropy((hidden @ weight.T + bias)[:, :classes], target, reduction="none")
    assert torch.allclose(nll, plain) and not nll.requires_grad
    assert total.item() == pytest.approx((plain * share).sum().item(), rel=1e-12)
    leaves = (hidden, weight, bias)
    for ours, theirs in zip(gradients(3 * total, *leaves), gradients(3 * (plain * share).sum(), *leaves)):
        assert torch.allclose(ours, theirs, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(hidden, weight, bias, target, share, classes)[1], plain)


@pytest.mark.parametrize("kind", [Shared(), Tied()])
def test_a_wide_flat_head_takes_the_fused_path_and_agrees_with_itself(kind, monkeypatch):
    tree = Tree.star(40)
    embedding = torch.nn.Embedding(48, WIDTH, dtype=FLOAT)
    head = kind.build(tree, embedding, None).to(FLOAT)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=FLOAT, generator=torch.Generator().manual_seed(2)))
    hidden = torch.randn(9, WIDTH, dtype=FLOAT, requires_grad=True)
    parent, slot, share = torch.full((9,), tree.root), torch.arange(9) * 4, torch.rand(9, dtype=FLOAT)
    leaves = [hidden, embedding.weight, *head.parameters()]
    plain, nll = weighted_nll(head, hidden, parent, slot, share)
    used = []
    real = linear_ce.linear_cross_entropy
    monkeypatch.setattr("tdlm.model.head.linear_cross_entropy", lambda *a: used.append(1) or real(*a))
    monkeypatch.setattr(head, "cheap", False)
    fused, same = weighted_nll(head, hidden, parent, slot, share)
    assert used and torch.allclose(nll, same)
    for a, b in zip(gradients(plain, *leaves), gradients(fused, *leaves)):
        assert torch.allclose(a, b, atol=1e-12)


@settings(max_examples=20)
@given(trees(max_leaves=6), st.integers(0, 100))
def test_the_three_ways_of_a_tied_head_agree(tree, seed):
    """A position gathers its own rows, shares a product with its parent's others, or there is one parent only."""
    head, _ = tied(tree)
    parent, slot = states(tree, 12, seed)
    parent, slot = parent[parent >= tree.size], slot[parent >= tree.size]
    hidden = torch.randn(len(parent), WIDTH, dtype=FLOAT, generator=torch.Generator().manual_seed(seed))
    ways = [head._gathered, head._by_parent] + ([lambda h, _: head._rooted(h)] if head.flat else [])
    first, *others = [head.masked(way(hidden, parent), parent) for way in ways]
    for other in others:
        assert torch.allclose(first, other)


def test_only_a_cheap_head_on_a_gpu_takes_all_positions():
    tree = Tree.from_nested([[0, 1], [2, 3]])
    assert not takes_all(Shared().build(tree, torch.nn.Embedding(8, 4), None), torch.zeros(2, 4))
    head = Tied().build(tree, torch.nn.Embedding(8, 4), None)
    parent, slot = torch.tensor([0, 3, tree.root]), torch.tensor([0, 0, 1])
    nll = Shared().build(tree, torch.nn.Embedding(8, 4), None).nll(torch.randn(3, 4), parent, slot)
    assert nll[:2].tolist() == [0.0, 0.0] and head.cheap
    assert not PerLevel().build(tree, torch.nn.Embedding(8, 4), None).cheap, "it waits for the count of each level's positions"


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_target_may_be_a_stretch_of_classes(rows, monkeypatch):
    monkeypatch.setattr(linear_ce, "BLOCK_BYTES", 64 * 8 * rows)
    monkeypatch.setattr(linear_ce, "ALIGNED", 8)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, WIDTH, dtype=FLOAT, generator=generator, requires_grad=True) for size in (23, 45))
    low = torch.randint(0, 40, (23,), generator=generator)
    high, share = low + torch.randint(1, 6, (23,), generator=generator), torch.rand(23, dtype=FLOAT, generator=generator)
    total, nll = linear_cross_entropy(hidden, weight, None, low, share, until=high)
    p = (hidden @ weight.T).softmax(-1)
    plain = -torch.stack([p[m, low[m]:high[m]].sum() for m in range(23)]).log()
    assert torch.allclose(nll, plain)
    leaves = (hidden, weight)
    for ours, theirs in zip(gradients(total, *leaves), gradients((plain * share).sum(), *leaves)):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("tied_rows", [False, True])
def test_the_dense_head_of_two_levels_in_blocks_is_the_dense_head(tied_rows, monkeypatch):
    """Clusters of MASK and tokens of clusters, with a token that hangs under the root and positions that predict nothing."""
    tree = Tree.from_nested([[3, 1, 2], [0, 4], 5, [6, 7, 8, 9]])
    monkeypatch.setattr("tdlm.model.dense.WIDE", 4)
    embedding = torch.nn.Embedding(tree.nodes, WIDTH)
    head = Dense(tied=tied_rows).build(tree, embedding, None)
    assert head.clusters is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    parent, slot = states(tree, 40, 5)
    parent, slot = parent[parent >= tree.size], slot[parent >= tree.size]
    hidden = torch.randn(len(parent), WIDTH, generator=torch.Generator().manual_seed(4), requires_grad=True)
    share = torch.rand(len(parent), generator=torch.Generator().manual_seed(6))
    leaves = [hidden, embedding.weight, *head.parameters()]
    fast, nll = head.weighted(hidden, parent, slot, share)
    slow = head.nll(hidden, parent, slot)
    assert torch.allclose(nll, slow, atol=1e-5)
    for ours, theirs in zip(gradients(fast, *leaves), gradients((slow * share).sum(), *leaves)):
        assert torch.allclose(ours, theirs, atol=1e-5)
