"""Heads: normalised over real children, equal to a slow dense twin, and the counts the paper states."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.errors import ConfigError
from tdlm.model import Backbone, PerLevel, Shared, Tied
from tdlm.model.model import count_parameters
from tdlm.model.transformer import round_up
from tdlm.objectives import TreeMethod
from tdlm.process import Cascade, Overlapping
from tdlm.rng import Draws
from tdlm.tree import Tree
from tests.worlds import trees

HEADS = [Shared(), PerLevel(), Tied(), Tied(bias=False)]


def setup(tree: Tree, head, conditioning="time", process=None, counts=None):
    config = RunConfig("t", TreeMethod(process=process or Cascade(), head=head), DataConfig(length=6),
                       BackboneConfig(2, 16, 2, conditioning, 8), TrainConfig())
    return assemble(config, tree, pad_id=None, counts=counts)


def shake(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


@settings(max_examples=12)
@given(trees(), st.sampled_from(HEADS))
def test_distributions_over_real_children(tree, head):
    model = setup(tree, head).model
    shake(model)
    inner = torch.arange(tree.size, tree.nodes)
    parents = inner[torch.randint(0, len(inner), (20,), generator=torch.Generator().manual_seed(1))]
    hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    log_probs = model.head.log_probs(hidden, parents)
    real = torch.arange(tree.branching) < tree.num_children[parents][:, None]
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(20), atol=1e-5)
    assert torch.isinf(log_probs[~real]).all() and torch.isfinite(log_probs[real]).all()
    slot = (torch.arange(20) * 7) % tree.num_children[parents]
    assert torch.allclose(model.head.nll(hidden, parents, slot), -log_probs.gather(1, slot[:, None])[:, 0], atol=1e-6)


@settings(max_examples=12)
@given(trees())
def test_tied_and_level_heads_equal_their_slow_twins(tree):
    """One position at a time with plain indexing: same values, same gradients."""
    hidden = torch.randn(12, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    inner = torch.arange(tree.size, tree.nodes)
    parents = inner[torch.randint(0, len(inner), (12,), generator=torch.Generator().manual_seed(1))]
    slot = torch.arange(12) % tree.num_children[parents]
    heights = tree.node_height()
    for head in (Tied(), PerLevel()):
        model = setup(tree, head).model
        shake(model)
        fast = model.head.nll(hidden, parents, slot)
        slow = []
        for h, u, k in zip(hidden, parents.tolist(), slot.tolist()):
            count = int(tree.num_children[u])
            if isinstance(head, Tied):
                kids = tree.children[u - tree.size, :count]
                logits = model.backbone.embedding.weight[kids] @ h + model.head.bias[kids]
            else:
                logits = model.head.outputs[int(heights[u]) - 1](h)[:count]
            slow.append(torch.logsumexp(logits, 0) - logits[k])
        slow = torch.stack(slow)
        assert torch.allclose(fast, slow, atol=1e-5)
        used = [p for p in model.parameters() if p.requires_grad]
        ours = torch.autograd.grad(fast.sum(), [hidden, *used], allow_unused=True)
        theirs = torch.autograd.grad(slow.sum(), [hidden, *used], allow_unused=True)
        for a, b in zip(ours, theirs):
            assert (a is None and b is None) or torch.allclose(a if a is not None else torch.zeros_like(b),
                                                               b if b is not None else torch.zeros_like(a), atol=1e-4)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 1, 5, 0, 3, 2]])
def test_a_star_takes_the_rows_of_its_children_wherever_they_stand(order):
    tree = Tree.from_nested(order)
    model = setup(tree, Tied()).model
    shake(model)
    hidden, root = torch.randn(5, model.backbone.width, generator=torch.Generator().manual_seed(2)), torch.full((5,), tree.root)
    scores = hidden @ model.backbone.embedding.weight[order].T + model.head.bias[order]
    assert model.head.in_order == (order == sorted(order))
    assert torch.allclose(model.head.log_probs(hidden, root), scores.log_softmax(-1), atol=1e-5)


def test_a_tied_head_starts_as_the_unigram_model():
    tree = Tree.from_nested([[0, 1], [2, [3, 4]]])
    counts = torch.tensor([50.0, 7, 0, 30, 3])
    assembly = setup(tree, Tied(), counts=counts)
    assembly.model.backbone.embedding.weight.data.zero_()
    p = (counts + 0.5) / (counts + 0.5).sum()
    mass = tree.mass(p.double())
    log_probs = assembly.model.head.log_probs(torch.randn(1, 16), torch.tensor([tree.root]))[0]
    kids = tree.children[-1]
    assert torch.allclose(log_probs.exp(), mass[kids].float(), atol=1e-6)


@pytest.mark.parametrize("process,conditioning", [(Cascade(), "time"), (Cascade(), "level"), (Cascade(), "none"),
                                                  (Overlapping(), "time"), (Overlapping(), "none")])
@pytest.mark.parametrize("head", HEADS)
def test_every_combination_trains_and_samples(process, conditioning, head):
    tree = Tree.from_nested([[0, 1], [2, [3, 4]], [5, 6, 7]])
    model, objective = (a := setup(tree, head, conditioning, process, torch.ones(8))).model, a.objective
    shake(model)
    tokens = torch.randint(0, 8, (6, 6), generator=torch.Generator().manual_seed(0))
    before = torch.random.get_rng_state()
    first = objective.loss(model, tokens, draws=Draws(1, 2, "train", torch.arange(6)))
    again = objective.loss(model, tokens, draws=Draws(1, 2, "train", torch.arange(6)))
    assert torch.equal(first.train, again.train) and torch.equal(first.bound, again.bound)
    assert first.bound.shape == (6,) and first.parts["levels"].shape == (6, 3)
    assert torch.allclose(first.parts["levels"].sum(1), first.bound)
    first.train.backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    drawn = objective.sample(model, (3, 6), steps=6, draws=Draws(1, 0, "sample", torch.arange(3)))
    assert drawn.tokens.shape == (3, 6) and int(drawn.tokens.max()) < 8 and int(drawn.tokens.min()) >= 0
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator must stay untouched"


def test_noise_of_a_sample_does_not_depend_on_the_batch_it_is_in():
    tree = Tree.from_nested([[0, 1], [2, [3, 4]]])
    model, objective = (a := setup(tree, Shared())).model, a.objective
    shake(model)
    tokens = torch.randint(0, 5, (8, 6), generator=torch.Generator().manual_seed(0))
    whole = objective.loss(model, tokens, draws=Draws(1, 2, "train", torch.arange(8), 8))
    parts = [objective.loss(model, tokens[i:i + 2], draws=Draws(1, 2, "train", torch.arange(i, i + 2), 8)) for i in (0, 2, 4, 6)]
    assert torch.allclose(whole.bound, torch.cat([p.bound for p in parts]), rtol=1e-4)
    assert torch.allclose(whole.train, torch.stack([p.train for p in parts]).mean(), rtol=1e-4)


def test_level_conditioning_needs_a_process_that_knows_its_level():
    with pytest.raises(ConfigError, match="conditioning"):
        setup(Tree.from_nested([[0, 1], [2, 3]]), Shared(), "level", Overlapping())


@pytest.mark.parametrize("blocks,width,heads,in_blocks,elsewhere", [(17, 768, 12, 130_520_832, 39_668_736),
                                                                    (27, 1024, 16, 361_331_712, 52_875_008)])
def test_parameter_counts_of_the_paper(blocks, width, heads, in_blocks, elsewhere):
    nodes = 50_258 + 512 + 1
    assert round_up(nodes) == 50_816
    with torch.device("meta"):
        backbone = Backbone(BackboneConfig(blocks, width, heads), nodes, 2)
        head = torch.nn.Linear(width, 512)
    from tdlm.model.model import Model
    counts = count_parameters(Model(backbone, head))
    assert (counts["blocks"], counts["elsewhere"]) == (in_blocks, elsewhere)
    assert counts["total"] == in_blocks + elsewhere


def test_a_fresh_block_is_the_identity_and_rotary_keeps_relative_positions():
    from tdlm.model.transformer import Block, rotary, rotate
    block = Block(16, 2, 8)
    x = torch.randn(2, 5, 16)
    cos, sin = rotary(5, 8, x.device)
    assert torch.equal(block(x, torch.randn(2, 8), cos, sin), x)
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = rotary(12, 8, x.device)
    near = [float(rotate(q, cos[i], sin[i]) @ rotate(k, cos[i + 3], sin[i + 3])) for i in range(9)]
    assert max(near) - min(near) < 1e-4
