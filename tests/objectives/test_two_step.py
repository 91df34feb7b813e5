"""The two-step softmax: a distribution whose steps are those of the path, and masked diffusion in everything else."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig
from tdlm.errors import ConfigError
from tdlm.model import Path, PathHead, Shared, Tied
from tdlm.objectives import MdlmMethod, TwoStepMethod
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.tree import Tree

TREES = {"two levels": Tree.from_nested([[0, 1, 2], [3, 4], [5, 6, 7]]),
         "three levels, ragged": Tree.from_nested([[[0, 1], [2]], [3, [4, 5]], 6, 7], size=8),
         "star": Tree.star(8)}
WIDTH, PAD = 16, 7


def head(tree: Tree) -> PathHead:
    made = Path().build(tree, nn.Embedding(tree.size + 1, WIDTH), None)
    made.steps._rows[0].double()
    generator = torch.Generator().manual_seed(0)
    for parameter in (*made.double().parameters(), made.steps._rows[0].weight):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def by_hand(made: PathHead, tree: Tree, hidden: Tensor) -> Tensor:
    """Token by token, step by step: a softmax over the children of each node on the way."""
    rows, bias = made.steps.weight, made.steps.bias
    scores = hidden @ rows.T + bias
    found = torch.zeros(len(hidden), tree.size, dtype=hidden.dtype)
    for token in range(tree.size):
        path = list(dict.fromkeys(tree.ancestor[:, token].tolist()))
        for child, parent in zip(path, path[1:]):
            kids = [kid for kid in tree.children[parent - tree.size].tolist() if kid >= 0]
            found[:, token] += scores[:, child] - scores[:, kids].logsumexp(-1)
    return found


@pytest.mark.parametrize("name", TREES)
def test_it_is_the_product_of_the_steps(name: str) -> None:
    tree = TREES[name]
    made, hidden = head(tree), torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    root, token = torch.full((24,), tree.size), torch.arange(24) % tree.size
    known = by_hand(made, tree, hidden.requires_grad_())
    assert torch.allclose(known.exp().sum(1), torch.ones(24, dtype=torch.float64))
    assert torch.allclose(made.log_probs(hidden, root), known, rtol=0, atol=1e-11)
    nll = made.nll(hidden, root, token)
    assert torch.allclose(nll, -known.gather(1, token[:, None])[:, 0], rtol=0, atol=1e-11)
    inputs = [hidden, made.steps.inner, made.steps.bias, made.steps._rows[0].weight]
    weights = torch.linspace(-1, 2, 24).double()
    for mine, reference in zip(*(torch.autograd.grad((cost * weights).sum(), inputs, retain_graph=True) for cost in (
            nll, -known.gather(1, token[:, None])[:, 0]))):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-11)
        assert bool(mine.any()) or (name == "star" and mine.shape == (1, WIDTH)), "nothing reads the row of a root"


def built(method: TwoStepMethod | MdlmMethod, tree: Tree) -> Assembly:
    config = replace(recipe("demo"), method=method, backbone=BackboneConfig(blocks=1, width=WIDTH, heads=2, conditioning="none"))
    return assemble(config, tree, pad_id=PAD, counts=torch.arange(1, 9))


def test_without_a_hidden_state_it_is_the_unigram_model() -> None:
    for tree in TREES.values():
        assembly = built(TwoStepMethod(), tree)
        with torch.no_grad():
            p = assembly.model.head.log_probs(torch.zeros(4, WIDTH), torch.full((4,), 8)).exp()
        torch.testing.assert_close(p, ((torch.arange(1, 9) + 0.5) / 40).expand(4, -1).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pad", ["count", "given-length"])
def test_with_the_same_predictions_it_is_masked_diffusion(pad: str) -> None:
    """Bound, train loss and every estimator are MDLM's for whatever distribution the head gives: here the star's own."""
    flat, two = built(MdlmMethod(head=Tied()), Tree.star(8)), built(TwoStepMethod(), TREES["two levels"])
    star = built(TwoStepMethod(), Tree.star(8))
    assert star.objective.num_states == flat.objective.num_states == two.objective.num_states == 9
    generator = torch.Generator().manual_seed(2)
    for (name, mine), other in zip(star.model.backbone.named_parameters(), flat.model.backbone.parameters()):
        mine.data = torch.randn(mine.shape, generator=generator) * (0.3 if "embedding" in name else 0.1)
        other.data = mine.data.clone()
    star.model.head.steps.bias.data = flat.model.head.bias.data[:9].clone()  # type: ignore[attr-defined]
    tokens = torch.randint(0, 8, (6, 5), generator=generator)
    tokens[1, 3:] = PAD
    ours, theirs = (one.objective.with_pad(pad) for one in (star, flat))  # type: ignore[arg-type]
    for name, score in ours.estimators(star.model).items():
        mine = score(star.model, tokens, draws=Draws(0, 0, "x", torch.arange(6)))
        other = theirs.estimators(flat.model)[name](flat.model, tokens, draws=Draws(0, 0, "x", torch.arange(6)))
        torch.testing.assert_close((mine.train, mine.bound), (other.train, other.bound), rtol=1e-5, atol=1e-5)


def test_the_bound_holds_exactly_where_the_answer_is_known() -> None:
    """One position, nothing else to see: the bound is -log p of the head, whatever the time that was drawn."""
    assembly = built(TwoStepMethod(), TREES["two levels"])
    generator = torch.Generator().manual_seed(3)
    for parameter in assembly.model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    tokens = torch.arange(8)[:, None]
    with torch.no_grad():
        count = assembly.objective.estimators(assembly.model)["count"]
        bound = count(assembly.model, tokens, draws=Draws(0, 0, "x", torch.arange(8))).bound
        hidden = assembly.model.hidden(torch.full((1, 1), 8), torch.ones(1), None)[0]
        known = assembly.model.head.log_probs(hidden, torch.full((1,), 8))[0]
    torch.testing.assert_close(bound, -known.double(), rtol=1e-5, atol=1e-6)
    assert float(torch.exp(-bound).sum()) == pytest.approx(1, abs=1e-5)
    drawn = assembly.objective.sample(assembly.model, (20_000, 1), steps=1, draws=Draws(0, 0, "y", torch.arange(20_000)))
    shares = torch.bincount(drawn.tokens.flatten(), minlength=8) / 20_000
    assert torch.allclose(shares, known.exp(), atol=4 * (0.25 / 20_000) ** 0.5)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"method\.head=path"):
        TwoStepMethod(head=Shared())
    with pytest.raises(ConfigError, match="clip must be positive"):
        TwoStepMethod(clip=0.0)
