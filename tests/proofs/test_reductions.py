"""A rival is a point of the same space: the methods meet where they should, draw for draw and number for number."""
from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig, DataConfig
from tdlm.errors import TreeError
from tdlm.model import Dense, Shared
from tdlm.objectives import HdlmMethod, MdlmMethod, TreeMethod
from tdlm.process import Cascade, Hierarchical, Overlapping
from tdlm.process.oracle import Enumeration
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.sample.draw import invert
from tdlm.tree import Tree
from tests.proofs.test_bound import integrate
from tests.worlds import TableModel, distribution, random_predictor

FLOAT = torch.float64
CLUSTERS = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]


def draws(rows: int, seed: int = 3) -> Draws:
    return Draws(seed, 0, "reduction", torch.arange(rows))


def build(method, tree: Tree) -> Assembly:
    """A small network with weights that are not at their start; the same for the same shapes."""
    config = replace(recipe("demo"), method=method, backbone=BackboneConfig(1, 16, 2, "none"), data=DataConfig(length=6))
    assembly = assemble(config, tree, pad_id=None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assembly.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return assembly


def rows(count: int, size: int, length: int = 6) -> torch.Tensor:
    return torch.randint(0, size, (count, length), generator=torch.Generator().manual_seed(1))


def test_on_the_star_tree_the_method_is_masked_diffusion():
    """Masked diffusion written out, with the same draws: MASK with probability t, cross-entropy over t."""
    tree, count = Tree.star(9), 2000
    tokens = rows(count, 9, length=3)
    answer = functools.cache(lambda nodes: random_predictor(tree)(nodes, 0.0))
    model = TableModel(tree, lambda nodes, t: answer(nodes))
    loss = MdlmMethod().objective(tree, None).loss(model, tokens, draws=draws(count))
    t, uniform = draws(count).strata("time"), draws(count).uniform("state", 3)
    masked = uniform >= (1 - t)[:, None]
    logits = model.hidden(torch.where(masked, 9, tokens), t, None)
    cross_entropy = -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] * masked
    assert torch.allclose(loss.bound, (cross_entropy / t[:, None]).sum(1), rtol=1e-14, atol=0)
    assert float(loss.train) == pytest.approx(float((cross_entropy / t[:, None]).mean()), rel=1e-12)


@pytest.mark.parametrize(("variant", "floor"), [("mdlm", 1e-3), ("gidd", 1e-4)])
def test_the_floor_of_time_is_the_train_weights_alone(variant, floor):
    tree, tokens = Tree.star(9), torch.tensor([[4], [4]])
    target = MdlmMethod(variant=variant).objective(tree, None)
    t = torch.tensor([floor / 10, floor * 10], dtype=FLOAT)
    moment = target.process.moment(t, 1, target.method.clip)
    loss = target.score(TableModel(tree, lambda nodes, t: torch.ones(1, 9, dtype=FLOAT)), tokens, torch.ones_like(tokens), moment)
    assert torch.allclose(loss.bound, math.log(9) / t, rtol=1e-12)
    assert float(loss.train) == pytest.approx(math.log(9) * (1 + 0.1) / floor / 2, rel=1e-12)


def test_on_the_star_tree_a_step_is_the_step_of_masked_diffusion():
    """From t to s a masked position is revealed with probability (t - s) / t: one step written out, draw for draw."""
    tree, count = Tree.star(9), 500
    model = TableModel(tree, random_predictor(tree))
    drawn = MdlmMethod().objective(tree, None).sample(model, (count, 3), steps=2, draws=draws(count))
    tokens, evaluations = torch.full((count, 3), 9), torch.zeros(count, dtype=torch.int64)
    for step, (t, s) in enumerate(((1.0, 0.5), (0.5, 0.0))):
        revealed = (draws(count).uniform(f"height {step} {step}", 3) < (t - s) / t) & (tokens == 9)
        p = model.hidden(tokens, torch.full((count,), t), None).softmax(-1)
        token = invert(p.flatten(0, 1), draws(count).uniform(f"child {step} {step} 0", 3).flatten()).view(count, 3)
        tokens = torch.where(revealed, token, tokens)
        evaluations += revealed.any(1)
    assert torch.equal(drawn.tokens, tokens) and torch.equal(drawn.evaluations, evaluations)


@pytest.mark.parametrize("head", [Shared(), Dense()])
def test_mdlm_is_the_tree_method_on_the_star(head):
    ours, theirs = build(MdlmMethod(head), Tree.star(9)), build(TreeMethod(Cascade(), head, clip=1e3), Tree.star(9))
    tokens = rows(16, 9)
    one, other = (a.objective.loss(a.model, tokens, draws=draws(16)) for a in (ours, theirs))
    assert torch.equal(one.bound, other.bound) and torch.equal(one.train, other.train)
    assert "count" in ours.objective.estimators(ours.model), "a network that is not told the time"


@pytest.mark.parametrize("method", [TreeMethod(Overlapping(), Dense(), clip=2.0), TreeMethod(Hierarchical(), Dense(), clip=2.0)])
def test_hdlm_is_the_overlapping_process_with_a_dense_head(method):
    """gamma = 1, xi = 1: the same draws, numbers, gradients and samples."""
    tree, tokens = Tree.from_nested(CLUSTERS), rows(64, 9)
    ours, theirs = build(HdlmMethod(), tree), build(method, tree)
    one, other = (a.objective.loss(a.model, tokens, draws=draws(64)) for a in (ours, theirs))
    assert torch.allclose(one.parts["levels"], other.parts["levels"], rtol=1e-12)
    assert torch.allclose(one.train, other.train, rtol=1e-6)
    gradients = [torch.autograd.grad(loss.train, list(a.model.parameters()), allow_unused=True)
                 for loss, a in ((one, ours), (other, theirs))]
    for mine, yours in zip(*gradients):
        assert (mine is None) == (yours is None) and (mine is None or torch.allclose(mine, yours, rtol=1e-4, atol=1e-7))
    samples = [a.objective.sample(a.model, (32, 6), steps=5, draws=draws(32)) for a in (ours, theirs)]
    assert torch.equal(samples[0].tokens, samples[1].tokens) and torch.equal(samples[0].evaluations, samples[1].evaluations)


def test_the_dense_head_is_one_model_on_every_tree():
    """With every token seen but one at the root, log p(token) is the same whatever tree leads to it."""
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    answers = []
    for tree in (Tree.star(9), Tree.from_nested(CLUSTERS), Tree.from_nested([[[8, 0], [3]], [[1, 2, 4, 5], [6, 7]]])):
        head = build(TreeMethod(Overlapping(), Dense()), tree).model.head
        weight = torch.randn(9, 16, generator=torch.Generator().manual_seed(6))
        head.weight.data, head.bias.data = weight, weight[:, 0].clone()  # pyright: ignore[reportAttributeAccessIssue]
        total = torch.zeros(4, 9)
        for token in range(9):
            for h in range(tree.height):
                parent = tree.ancestor[h + 1, token].expand(4)
                if int(parent[0]) >= 9:
                    total[:, token] -= head.nll(hidden, parent, tree.slot[h, token].expand(4))
        answers.append(total.detach())
    for other in answers[1:]:
        assert torch.allclose(answers[0], other, atol=1e-5)


def test_mdlm_with_the_exact_denoiser_attains_minus_log_p():
    tree = Tree.star(4)
    enumeration = Enumeration(tree, distribution(4, 3, 7))
    target = MdlmMethod().objective(tree, None)
    for x in ((0, 3, 1), (2, 2, 0)):
        got = integrate(target, TableModel(tree, enumeration.exact), enumeration, x)
        assert float(got.sum()) == pytest.approx(-math.log(float(enumeration.joint[x])), abs=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 1.7, 2.0])
def test_the_tree_method_on_the_hierarchical_process_attains_minus_log_p(gamma):
    """The process serves any head and any tree of height 2, padded paths and single children included."""
    enumeration = Enumeration(Tree.from_nested([[0, 1], 2, [3], [4, 5]]), distribution(6, 2, 1))
    tree = enumeration.tree
    target = TreeMethod(Hierarchical(gamma), Shared(), clip=None).objective(tree, None)
    for x in ((0, 2), (3, 5)):
        got = integrate(target, TableModel(tree, enumeration.exact), enumeration, x, count=16)
        assert float(got.sum()) == pytest.approx(-math.log(float(enumeration.joint[x])), abs=1e-9)


def test_mdlm_refuses_another_tree():
    with pytest.raises(TreeError, match="star"):
        MdlmMethod().objective(Tree.from_nested(CLUSTERS), None)
