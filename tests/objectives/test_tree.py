"""The tree method: what does not fit the tree, and positions handed to the head although they have nothing to predict."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig
from tdlm.errors import ConfigError
from tdlm.model.head import PerLevel, Shared, Tied
from tdlm.objectives import TreeMethod, base
from tdlm.process import Cascade, Hierarchical, Overlapping
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.tree import Tree

PAD = 7
PADDED = Tree.from_nested([[[0, 1], [2]], [3, [4, 5]], 6, 7], size=8)


def build(method: TreeMethod) -> Assembly:
    config = replace(recipe("demo"), method=method, backbone=BackboneConfig(blocks=1, width=16, heads=2, conditioning="none"))
    assembly = assemble(config, PADDED, pad_id=PAD)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assembly.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return assembly


@pytest.mark.parametrize("process", [Cascade(thresholds=(0.5,)), Hierarchical()])
def test_a_process_that_does_not_fit_the_tree_is_refused_before_the_first_step(process):
    with pytest.raises(ConfigError, match="height"):
        TreeMethod(process=process).objective(PADDED, None)


@pytest.mark.parametrize("pad", ["count", "given-length", "drop"])
@pytest.mark.parametrize("process", [Cascade(), Overlapping()])
@pytest.mark.parametrize("head", [Shared(), Tied(), PerLevel()])
def test_positions_may_be_put_in_the_heads_order(head, process, pad, monkeypatch):
    """As the processor does for a GPU: no number and no gradient may differ."""
    monkeypatch.setattr("tdlm.model.head.FEW", 1)
    assembly = build(TreeMethod(process=process, head=head))
    tokens = torch.randint(0, 8, (6, 5), generator=torch.Generator().manual_seed(0))
    tokens[2:, 3:] = PAD
    answers = []
    for everything in (False, True):
        monkeypatch.setattr(base, "sorts", lambda tokens, device, everything=everything: everything)
        loss = assembly.objective.with_pad(pad).loss(assembly.model, tokens, draws=Draws(0, 0, "all", torch.arange(6)))
        gradients = torch.autograd.grad(loss.train, list(assembly.model.parameters()), allow_unused=True)
        answers.append([loss.train, loss.bound, loss.parts["levels"], *(g for g in gradients if g is not None)])
    assert len(answers[0]) == len(answers[1]) > 10 and bool((answers[0][1] > 0).any())
    for one, other in zip(*answers):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
