"""The adaptive softmax: torch's own in other clothes, in the order of the training counts, which is saved with the weights."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tdlm.assemble import assemble
from tdlm.config import RunConfig
from tdlm.errors import ConfigError
from tdlm.model import Adaptive, AdaptiveHead, Causal
from tdlm.model.adaptive import SHARES
from tdlm.objectives import Autoregressive, AutoregressiveTree
from tdlm.registry import from_json, to_json
from tdlm.rng import Draws
from tdlm.train import checkpoint
from tdlm.tree import Tree

SIZE, WIDTH = 30, 16
COUNTS = torch.tensor([(7 * i) % 31 for i in range(SIZE)])  # all different


def head(cutoffs: tuple[int, ...] = (4, 12), div_value: float = 2.0, counts: Tensor | None = COUNTS) -> AdaptiveHead:
    """A head in float64 with weights away from their start."""
    tree, embedding = Tree.star(SIZE), nn.Embedding(32, WIDTH)
    made = Adaptive(cutoffs, div_value).build(tree, embedding, None if counts is None else tree.mass(counts.double())).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def asked(rows: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return hidden, torch.full((rows,), SIZE), torch.arange(rows) % SIZE


@pytest.mark.parametrize(("cutoffs", "div_value"), [((4, 12), 2.0), ((4, 12), 4.0), ((10,), 4.0), ((1, 2, 29), 1.0)])
def test_it_equals_torchs_own(cutoffs, div_value):
    """Same weights, classes in order of frequency: losses, all log-probabilities and gradients."""
    ours = head(cutoffs, div_value)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, SIZE, list(cutoffs), div_value=div_value).double()
    theirs.head.weight.data.copy_(ours.output.weight)
    for mine, other in zip(ours.tails, theirs.tail):
        for number in ("0", "1"):
            other.get_submodule(number).weight.data.copy_(mine.get_submodule(number).weight)
    hidden, root, slot = asked()
    rank = torch.empty(SIZE, dtype=torch.int64)
    rank[COUNTS.argsort(descending=True)] = torch.arange(SIZE)
    nll = ours.nll(hidden.requires_grad_(), root, slot)
    reference = theirs(hidden, rank[slot]).output
    assert torch.allclose(nll, -reference, rtol=0, atol=1e-12)
    assert torch.allclose(ours.log_probs(hidden, root), theirs.log_prob(hidden)[:, rank], rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 2, len(slot)).double()
    mine = torch.autograd.grad((nll * weights).sum(), [hidden, *ours.parameters()])
    other = torch.autograd.grad(-(reference * weights).sum(), [hidden, *theirs.parameters()])
    assert len(mine) == len(other) == 2 + 2 * len(cutoffs)
    for a, b in zip(mine, other):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_it_is_a_distribution_and_nll_is_its_logarithm():
    made, (hidden, root, slot) = head(), asked()
    log_probs = made.log_probs(hidden, root)
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(60).double(), atol=1e-12)
    assert torch.allclose(made.nll(hidden, root, slot), -log_probs.gather(1, slot[:, None])[:, 0], atol=1e-12)
    assert made.nll(hidden[:0], root[:0], slot[:0]).shape == (0,)


def test_a_cluster_meets_only_the_positions_that_need_it():
    made, (hidden, root, slot) = head(), asked()
    met = []
    for tail in made.tails:
        tail.register_forward_hook(lambda module, given, answer: met.append(len(given[0])))
    made.nll(hidden, root, slot)
    rank = made.rank[slot]
    assert met == [int(((rank >= 4) & (rank < 12)).sum()), int((rank >= 12).sum())] == [16, 36]


def test_the_order_is_that_of_the_counts_and_of_the_ids_where_they_say_nothing():
    assert head().rank[COUNTS.argmax()] == 0 and head().rank[COUNTS.argmin()] == SIZE - 1
    assert torch.equal(head(counts=None).rank, torch.arange(SIZE))
    assert torch.equal(head(counts=torch.ones(SIZE)).rank, torch.arange(SIZE)), "equal counts keep the order of the ids"
    # children of the root in another order than the ids: the head is asked about slots
    tree = Tree.from_nested([2, 0, 1])
    made = Adaptive((1,)).build(tree, nn.Embedding(4, WIDTH), tree.mass(torch.tensor([5.0, 1.0, 9.0])))
    assert made.rank.tolist() == [0, 1, 2]


def config() -> RunConfig:
    return RunConfig("a", Autoregressive(head=Adaptive((4, 12))), backbone=Causal(blocks=1, width=WIDTH, heads=2))


def test_the_order_is_saved_with_the_weights(tmp_path):
    """A run that is opened again has no counts: without the order its tokens would be other tokens."""
    trained = assemble(config(), Tree.star(SIZE), pad_id=None, counts=COUNTS)
    for parameter in trained.model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.3
    checkpoint.save(tmp_path, 1, {"model": checkpoint.model_tensors(trained.model)}, {})
    opened = assemble(config(), Tree.star(SIZE), pad_id=None)
    assert torch.equal(opened.model.predictor.rank, torch.arange(SIZE))
    checkpoint.load_model(tmp_path, opened.model)
    assert torch.equal(opened.model.predictor.rank, trained.model.predictor.rank)
    tokens, draws = torch.arange(SIZE).view(3, 10), Draws(0, 0, "t", torch.arange(3))
    before, after = (a.objective.loss(a.model, tokens, draws=draws).bound for a in (trained, opened))
    assert torch.equal(before, after)
    opened.model.predictor.rank.copy_(torch.arange(SIZE))
    assert not torch.allclose(opened.objective.loss(opened.model, tokens, draws=draws).bound, before, rtol=1e-3)


def test_an_untrained_head_is_uniform_over_the_short_list_and_within_clusters():
    assembly = assemble(config(), Tree.star(SIZE), pad_id=None, counts=COUNTS)
    log_probs = assembly.model.head.log_probs(torch.randn(2, WIDTH), torch.full((2,), SIZE))
    rank = assembly.model.predictor.rank
    expected = torch.where(rank < 4, 1 / 6, torch.where(rank < 12, 1 / 6 / 8, 1 / 6 / 18)).log()
    assert torch.allclose(log_probs, expected.expand(2, -1), atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 5, 12, 4096, 50_258])
def test_default_cutoffs_grow_with_the_vocabulary(size):
    tree = Tree.star(size)
    with torch.device("meta"):
        made = Adaptive().build(tree, nn.Embedding(size + 1, 64), None)
    assert made.cutoffs[0] > 0 and made.cutoffs[-1] < size and list(made.cutoffs) == sorted(set(made.cutoffs))
    if size > 100:
        assert made.cutoffs == tuple(round(share * size) for share in SHARES)
        inner, last = ([len(tail.get_submodule(number).weight) for tail in made.tails] for number in ("0", "1"))
        assert len(made.output.weight) - len(made.cutoffs) + sum(last) == size and inner == [16, 4]


def test_half_precision_products_give_float32_losses():
    made, (hidden, root, slot) = head().bfloat16(), asked()
    nll = made.nll(hidden.bfloat16(), root, slot).detach()
    assert nll.dtype is torch.float32 and made.log_probs(hidden.bfloat16(), root).dtype is torch.float32
    assert math.isclose(float(nll.mean()), float(head().nll(hidden, root, slot).detach().mean()), rel_tol=0.03)


@pytest.mark.parametrize("options", [{"cutoffs": (5, 5)}, {"cutoffs": (0, 3)}, {"cutoffs": ()}, {"div_value": 0.5},
                                     {"div_value": math.nan}])
def test_settings_that_make_no_sense(options):
    with pytest.raises(ConfigError, match=r"head\.(cutoffs|div_value)"):
        Adaptive(**options)


def test_what_it_cannot_stand_on():
    tall = RunConfig("t", AutoregressiveTree(head=Adaptive()), backbone=Causal(blocks=1, width=8, heads=2))
    with pytest.raises(ConfigError, match=r"2 levels.*flat"):
        assemble(tall, Tree.from_nested([[0, 1], [2, 3]]), pad_id=None)
    with pytest.raises(ConfigError, match="below the vocabulary's 4 tokens"):
        Adaptive((2, 4)).build(Tree.star(4), nn.Embedding(8, 8), None)


def test_json_knows_it():
    assert from_json(object, to_json(Adaptive((2000, 10_000), 2.0))) == Adaptive((2000, 10_000), 2.0)
