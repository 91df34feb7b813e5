"""Sweeps over rows, the embedding made of them, and the sorted cross-entropy: against plain torch, and the GPU's kernels against
the same formulas (in Triton's interpreter where there is no GPU)."""
from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from tdlm.model.head import Shared, Tied, arranged, weighted_nll
from tdlm.model.kernels import rows
from tdlm.model.kernels.sorted_ce import limited_cross_entropy
from tdlm.tree import Tree
from tests.model.test_kernels import gradients, states


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def kernels() -> tuple[ModuleType, str]:
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from tdlm.model.kernels import rows_triton

    return rows_triton, "cuda" if torch.cuda.is_available() else "cpu"


def test_gather_and_place(kernels: tuple[ModuleType, str]) -> None:
    fast, device = kernels
    table, index = make(50, 24), whole(50, 3, 7)
    assert torch.equal(fast.gather(table.to(device), index.to(device), torch.float32).cpu(), table[index])
    out, target, source = torch.zeros(40, 24, device=device), torch.randperm(40)[:20], whole(50, 20)
    fast.place(table.to(device), source.to(device), target.to(device), out)
    truth = torch.zeros(40, 24)
    rows.place(table, source, target, truth)
    assert torch.equal(out.cpu(), truth) and torch.equal(truth[target], table[source])


@pytest.mark.parametrize("ordered", [False, True])
def test_runs_are_added_up(kernels: tuple[ModuleType, str], ordered: bool) -> None:
    """Runs within a program, across programs, and single rows."""
    fast, device = kernels
    key, order = torch.cat([torch.zeros(70, dtype=torch.int64), whole(9, 30)]).sort()
    values, out, truth = make(100, 20), torch.zeros(9, 20, device=device), torch.zeros(9, 20)
    fast.add_runs(values.to(device), key.to(device), out, order.to(device) if ordered else None)
    rows.add_runs(values, key, truth, order if ordered else None)
    assert torch.allclose(out.cpu(), truth, atol=1e-4)
    assert torch.allclose(truth, torch.zeros(9, 20).index_add(0, key, values[order] if ordered else values), atol=1e-4)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_choose(kernels: tuple[ModuleType, str], offset: bool, gradient: bool) -> None:
    fast, device = kernels
    logits, table, group, limit = make(30, 12), make(4, 12, seed=1), whole(4, 30), torch.tensor([12, 1, 5, 9])
    slot, share = (torch.rand(30) * limit[group]).long(), torch.rand(30)
    ours, theirs = logits.clone().to(device), logits.clone()
    nll = fast.choose(ours, table.to(device) if offset else None, group.to(device), limit.to(device), slot.to(device),
                      share.to(device) if gradient else None)
    truth = rows.choose(theirs, table if offset else None, group, limit, slot, share if gradient else None)
    assert torch.allclose(nll.cpu(), truth, atol=1e-5) and torch.allclose(ours.cpu(), theirs, atol=1e-5)
    assert torch.equal(theirs, logits) != gradient


@pytest.mark.parametrize("stretch", [False, True])
def test_choose_wide(kernels: tuple[ModuleType, str], stretch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that do not divide the classes, with padding that is no class, and stretches of one class, of pieces, of all."""
    fast, device = kernels
    monkeypatch.setattr(fast, "CHUNK", 16)
    logits, share, low, high = make(20, 70) * 5, torch.rand(20), whole(61, 20), None
    if stretch:
        high = torch.minimum(low + 1 + whole(40, 20, seed=2), torch.tensor(61))
        low[:3], high[:3] = torch.tensor([0, 16, 60]), torch.tensor([61, 32, 61])
        logits[4, low[4]:high[4]] -= 300  # far below the rest
    offset = torch.cat([make(61, seed=1), torch.full((9,), -torch.inf)])
    leaf = logits.clone().requires_grad_()
    if high is None:
        truth = F.cross_entropy(leaf + offset, low, reduction="none")
    else:
        value = leaf + offset
        truth = value.logsumexp(1) - torch.stack([value[m, low[m]:high[m]].logsumexp(0) for m in range(20)])
    (slope,) = torch.autograd.grad((truth * share).sum(), leaf)
    for choose, place in ((fast.choose_wide, device), (rows.choose_wide, "cpu")):
        ours, until = logits.clone().to(place), None if high is None else high.to(place)
        silent = choose(ours, offset.to(place), low.to(place), None, until)
        assert torch.equal(ours.cpu(), logits) and torch.allclose(silent.cpu(), truth, atol=1e-4)
        nll = choose(ours, offset.to(place), low.to(place), share.to(place), until)
        assert torch.allclose(nll.cpu(), truth, atol=1e-4) and torch.allclose(ours.cpu(), slope, atol=1e-5)


def test_survey_and_tilt(kernels: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through plain formulas; classes far from every threshold of the softplus, and padding that is none."""
    fast, device = kernels
    monkeypatch.setattr(fast, "CHUNK", 32)
    logits, pair, k, slopes = make(20, 70) * 5, whole(61, 20, 2), make(20, seed=3) * 12, make(3, 20, seed=4)
    pair[:5, 1] = pair[:5, 0]
    offset = torch.cat([make(61, seed=1), torch.full((9,), -torch.inf)])
    leaf = logits.clone().requires_grad_()
    log_p = (leaf + offset).log_softmax(1)[:, :61]
    raised = log_p + k[:, None]
    truth = torch.stack([*log_p.gather(1, pair).unbind(1), F.softplus(raised.double(), threshold=40).float().sum(1)])
    (gradient,) = torch.autograd.grad((truth * slopes).sum(), leaf)
    for place, there in ((fast, device), (rows, "cpu")):
        ours, *known = (values.clone().to(there) for values in (logits, offset, pair, k))
        found, normaliser, lift = place.survey(ours, *known)
        assert torch.equal(ours.cpu(), logits)
        assert torch.allclose(torch.stack(list(found)).cpu(), truth.detach(), rtol=1e-5, atol=2e-5)
        place.tilt(ours, *known, normaliser, lift, rows.Survey(*slopes.to(there)))
        assert torch.allclose(ours.cpu(), gradient, atol=1e-4)


def test_the_embedding_and_the_rows_taken() -> None:
    embedding, nodes, aim = torch.nn.Embedding(11, 6).double(), whole(11, 4, 5), make(4, 5, 6).double()
    slow = torch.autograd.grad((embedding(nodes) * aim).sum(), embedding.weight)[0]
    quick = torch.autograd.grad((rows.embed(embedding, nodes, torch.float64) * aim).sum(), embedding.weight)[0]
    assert torch.allclose(slow, quick)
    hidden, index = make(20, 6).double().requires_grad_(), torch.randperm(20)[:9]
    ours = torch.autograd.grad((rows.take(hidden, index) * aim.view(-1, 6)[:9]).sum(), hidden)[0]
    assert torch.equal(ours, torch.autograd.grad((hidden[index] * aim.view(-1, 6)[:9]).sum(), hidden)[0])


@pytest.mark.parametrize("nested", [[[0, 1, 2], [3, 4], [5, 6, 7, 8], 9], [[[0, 1], [2]], [[3, 4, 5], [6]], [7, [8, 9]]]])
@pytest.mark.parametrize("bias", [True, False])
def test_sorted_cross_entropy_is_the_heads(nested: list, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parent, tokens that hang higher, groups without a position; values and gradients."""
    monkeypatch.setattr("tdlm.model.head.FEW", 1)
    tree = Tree.from_nested(nested)
    embedding = torch.nn.Embedding(tree.nodes + 3, 16)
    head = Tied(bias).build(tree, embedding, None)
    if bias:
        torch.nn.init.normal_(head.bias)
    parent, slot = states(tree, 60, 1)
    some = tree.num_children[parent] > 1
    parent, slot = parent[some], slot[some]
    hidden, share = make(len(parent), 16).requires_grad_(), torch.rand(len(parent))
    order = arranged(head, parent, slot)
    assert order is not None
    total, nll = weighted_nll(head, hidden[order.order], parent[order.order], slot[order.order], share[order.order], order)
    plain = head.nll(hidden, parent, slot)
    assert torch.allclose(nll, plain[order.order], atol=1e-5) and not nll.requires_grad
    leaves = [hidden, embedding.weight, *head.parameters()]
    for ours, theirs in zip(gradients(3 * total, *leaves), gradients(3 * (plain * share).sum(), *leaves)):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_limited_cross_entropy_is_the_shared_heads() -> None:
    tree = Tree.from_nested([[0, 1, 2], [3, 4], [5, 6, 7, 8], 9])
    head = Shared().build(tree, torch.nn.Embedding(tree.nodes, 16), None).double()
    torch.nn.init.normal_(head.output.weight)
    torch.nn.init.normal_(head.output.bias)
    parent, slot = states(tree, 40, 2)
    some = tree.num_children[parent] > 1
    parent, slot = parent[some], slot[some]
    hidden, share = make(len(parent), 16).double().requires_grad_(), torch.rand(len(parent), dtype=torch.float64)
    total, nll = limited_cross_entropy(hidden, head.output.weight, head.output.bias, parent, tree.num_children, slot, share)
    plain = head.nll(hidden, parent, slot)
    assert torch.allclose(nll, plain)
    leaves = [hidden, *head.parameters()]
    for ours, theirs in zip(gradients(2 * total, *leaves), gradients(2 * (plain * share).sum(), *leaves)):
        assert torch.allclose(ours, theirs)
