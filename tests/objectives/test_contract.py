"""The one interface, kept by every method that is registered: the same checks for all, none of them named here."""
from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

import tdlm.objectives  # noqa: F401 - registers the methods
from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig, DataConfig
from tdlm.errors import SampleError
from tdlm.model.causal import Causal
from tdlm.objectives.base import Objective
from tdlm.recipes import recipe
from tdlm.registry import KINDS, from_json, to_json
from tdlm.rng import Draws
from tdlm.tree import Tree

NESTED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
PAD, LENGTH, ROWS = 11, 7, 6
METHODS = sorted(kind for kind, part in KINDS.items()
                 if getattr(part, "role", None) == "method" and part.__module__.startswith("tdlm."))


def build(kind: str, conditioning: str = "none") -> Assembly:
    """The method with its defaults, a small network with weights that are not at their start, and its tree."""
    method = KINDS[kind]()
    tree = Tree.star(12) if method.flat else Tree.from_nested(NESTED)
    backbone = (Causal(blocks=1, width=16, heads=2) if method.causal
                else BackboneConfig(blocks=1, width=16, heads=2, conditioning=conditioning))
    config = replace(recipe("demo"), method=method, backbone=backbone, data=DataConfig(length=LENGTH))
    assembly = assemble(config, tree, pad_id=PAD, counts=torch.arange(1, 13))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assembly.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return assembly


def rows(count: int = ROWS) -> torch.Tensor:
    tokens = torch.randint(0, 11, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[0, 4:] = PAD
    return tokens


def draws(count: int = ROWS, seed: int = 3) -> Draws:
    return Draws(seed, 0, "contract", torch.arange(count))


@pytest.mark.parametrize("kind", METHODS)
def test_it_is_an_objective_that_json_knows(kind):
    assembly = build(kind)
    assert isinstance(assembly.objective, Objective)
    method = KINDS[kind]()
    assert dataclasses.is_dataclass(method) and from_json(object, to_json(method)) == method
    assert assembly.objective.samplers and assembly.objective.estimators(assembly.model)


@pytest.mark.parametrize("kind", METHODS)
def test_the_loss_is_a_function_of_its_draws_and_leaves_the_global_generator_alone(kind):
    assembly = build(kind)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (assembly.objective.loss(assembly.model, rows(), draws=draws(seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.train, two.train) and torch.equal(one.bound, two.bound)
    if "exact" not in assembly.objective.estimators(assembly.model):
        assert not torch.equal(one.bound, other.bound)


@pytest.mark.parametrize("kind", METHODS)
def test_shapes_parts_and_gradients(kind):
    assembly = build(kind)
    loss = assembly.objective.loss(assembly.model, rows(), draws=draws())
    assert loss.train.shape == () and loss.bound.shape == (ROWS,)
    assert loss.parts["levels"].shape == (ROWS, assembly.objective.levels)
    assert torch.allclose(loss.parts["levels"].sum(1), loss.bound)
    assert loss.parts["tokens"].tolist() == [4] + [LENGTH] * (ROWS - 1)
    assert not loss.bound.requires_grad
    loss.train.backward()
    gradients = [p.grad for p in assembly.model.parameters() if p.grad is not None]
    assert gradients and all(bool(torch.isfinite(g).all()) for g in gradients)
    assert any(bool((g != 0).any()) for g in gradients)


@pytest.mark.parametrize("kind", METHODS)
def test_a_batch_may_be_cut_into_micro_batches(kind):
    """Rows that are scored in passes, or on other ranks, have the numbers that they have together."""
    assembly, tokens = build(kind), rows()
    whole = assembly.objective.loss(assembly.model, tokens, draws=draws())
    parts = [assembly.objective.loss(assembly.model, tokens[half], draws=draws().part(half))
             for half in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))]
    torch.testing.assert_close(torch.cat([part.bound for part in parts]), whole.bound, rtol=1e-5, atol=1e-5)
    train = torch.stack([part.train.detach().double() for part in parts]).mean()
    torch.testing.assert_close(train, whole.train.detach().double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", METHODS)
def test_every_estimator_estimates_the_same_number(kind):
    assembly = build(kind)
    tokens = rows(2)[1:].expand(3000, -1)
    means, errors = [], []
    for score in assembly.objective.estimators(assembly.model).values():
        with torch.no_grad():
            bound = score(assembly.model, tokens, draws=draws(3000)).bound
        means.append(float(bound.mean()))
        errors.append(float(bound.std() / len(bound) ** 0.5))
        assert means[-1] > 0
    for mean, error in zip(means, errors):
        assert abs(mean - means[0]) < 5 * (error + errors[0]) + 1e-6


@pytest.mark.parametrize("kind", METHODS)
def test_samples_are_tokens_and_do_not_depend_on_their_batch(kind):
    assembly = build(kind)
    for sampler in assembly.objective.samplers:
        drawn = assembly.objective.sample(assembly.model, (4, LENGTH), steps=6, draws=draws(4), sampler=sampler)
        assert drawn.tokens.shape == (4, LENGTH)
        assert bool(((drawn.tokens >= 0) & (drawn.tokens < 12)).all())
        alone = Draws(3, 0, "contract", torch.tensor([2]))
        single = assembly.objective.sample(assembly.model, (1, LENGTH), steps=6, draws=alone, sampler=sampler)
        assert torch.equal(single.tokens[0], drawn.tokens[2]), f"{sampler}: sample 2 alone differs from itself in a batch"
        assert drawn.evaluations.shape == (4,) and int(drawn.evaluations.max()) <= drawn.calls


@pytest.mark.parametrize("kind", METHODS)
def test_a_prompt_stays_and_an_unknown_sampler_is_named(kind):
    assembly = build(kind)
    prompt = torch.tensor([7, 2, 5])
    for sampler in assembly.objective.samplers:
        drawn = assembly.objective.sample(assembly.model, (2, LENGTH), steps=6, draws=draws(2), prefix=prompt, sampler=sampler)
        assert drawn.tokens[:, :3].tolist() == [prompt.tolist()] * 2
    with pytest.raises(SampleError, match="no sampler"):
        assembly.objective.sample(assembly.model, (2, LENGTH), steps=6, draws=draws(2), sampler="by-magic")
