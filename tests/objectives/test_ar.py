"""Left-to-right models: every sequence enumerated, the sampler against that law, and what each PAD mode means."""
from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.assemble import Assembly, assemble
from tdlm.config import DataConfig, RunConfig
from tdlm.errors import ConfigError, SampleError
from tdlm.evaluate.likelihood import evaluate_bound
from tdlm.model import Adaptive, Causal, PerLevel, Shared, Tied
from tdlm.objectives import Autoregressive, AutoregressiveTree
from tdlm.registry import from_json
from tdlm.rng import Draws
from tdlm.sample import Choice
from tdlm.tree import Tree

TREES = {2: [[0, 1]], 3: [[0, 2], 1], 4: [[0, 3], [1, [2]]], 5: [3, [0, [1, [4, 2]]]]}
"""Padded paths, nodes with one child, tokens out of order."""


def build(method: Any, tree: Tree, *, style: str = "llama", pad_id: int | None = None, seed: int = 0) -> Assembly:
    """A small network in float64 with weights that make some sequences much likelier than others."""
    config = RunConfig("w", method, DataConfig(length=3), Causal(style=style, blocks=1, width=8, heads=2, longest=8))
    made = assemble(config, tree, pad_id=pad_id, counts=torch.arange(1, tree.size + 1))
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.model.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
    made.model.double()
    return made


def everything(size: int, length: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(size), repeat=length)))


@torch.no_grad()
def score(assembly: Assembly, tokens: Tensor, pad: str | None = None) -> Tensor:
    objective = assembly.objective if pad is None else assembly.objective.with_pad(pad)
    return objective.loss(assembly.model, tokens, draws=draws(len(tokens))).bound


def draws(count: int, seed: int = 1) -> Draws:
    return Draws(seed, 0, "ar", torch.arange(count))


WORLDS = [(Autoregressive(head), size) for head in (Shared(), Tied(), Tied(bias=False), Adaptive((1, 2), 2.0)) for size in (3, 5)]
WORLDS += [(AutoregressiveTree(head), size) for head in (Shared(), PerLevel(), Tied()) for size in (2, 3, 4, 5)]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("method", "size"), WORLDS)
def test_the_probabilities_of_all_sequences_sum_to_one(method, size, length, style):
    assembly = build(method, Tree.star(size) if method.flat else Tree.from_nested(TREES[size]), style=style)
    bound = score(assembly, everything(size, length))
    exact = isinstance(method.head, Adaptive)  # the other heads give float32 losses
    assert float(torch.exp(-bound).sum()) == pytest.approx(1, abs=1e-12 if exact else 1e-6)
    assert float(bound.max() - bound.min()) > 0.1, "a uniform law would prove little"


def test_the_levels_are_the_levels_of_the_tree():
    """Marginalising the tokens below each node gives the law of the nodes: the upper level's part of the bound."""
    tree = Tree.from_nested([[0, 3], [1, 2, 4]])
    assembly = build(AutoregressiveTree(), tree)
    tokens = everything(5, 1)
    with torch.no_grad():
        loss = assembly.objective.loss(assembly.model, tokens, draws=draws(5))
    p = torch.exp(-loss.bound)
    for node in (5, 6):
        below = tree.ancestor[1] == node
        assert torch.allclose(torch.exp(-loss.parts["levels"][below, 1]), p[below].sum().expand(int(below.sum())), atol=1e-6)
        assert torch.allclose(torch.exp(-loss.parts["levels"][below, 0]), p[below] / p[below].sum(), atol=1e-6)


@pytest.mark.parametrize("head", [Shared(), PerLevel(), Tied()])
def test_down_the_star_tree_it_is_the_ordinary_softmax(head):
    flat, tree = (build(method, Tree.star(4), pad_id=3) for method in (Autoregressive(head), AutoregressiveTree(head)))
    tokens = everything(4, 3)
    one, other = (a.objective.loss(a.model, tokens, draws=draws(64)) for a in (flat, tree))
    assert torch.equal(one.bound, other.bound) and torch.equal(one.train, other.train)
    hidden = flat.model.hidden(torch.cat([torch.full_like(tokens[:, :1], 4), tokens[:, :-1]], 1), torch.zeros(64), None)
    dense = flat.model.head.logits(hidden.flatten(0, 1), torch.full((192,), 4))
    reference = torch.nn.functional.cross_entropy(dense, tokens.flatten(), reduction="none").view(64, 3).sum(1)
    assert torch.allclose(one.bound, reference.double(), atol=1e-6)


class Recording:
    """A head that keeps the losses it gave."""

    def __init__(self, head: Any):
        self.head, self.given = head, torch.empty(0)

    def nll(self, hidden: Tensor, parent: Tensor, slot: Tensor) -> Tensor:
        self.given = self.head.nll(hidden, parent, slot)
        return self.given

    def log_probs(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return self.head.log_probs(hidden, parent)


class Forgetful:
    """The network without its memory: it has to read everything again."""

    told_time = False

    def __init__(self, model: Any):
        self.model, self.head = model, model.head

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return self.model.hidden(nodes, time, level)


class Recorded(Forgetful):
    def __init__(self, model: Any):
        self.model, self.head = model, Recording(model.head)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("method", [Autoregressive(), AutoregressiveTree()])
def test_a_token_does_not_alter_the_losses_before_it(method, style):
    assembly = build(method, Tree.star(4) if method.flat else Tree.from_nested([[0, 3], [1, 2]]), style=style)
    network, levels = Recorded(assembly.model), assembly.objective.levels

    def losses(tokens: Tensor) -> Tensor:
        assembly.objective.loss(network, tokens, draws=draws(1))
        return network.head.given.view(levels, -1)

    first = torch.tensor([[2, 0, 3, 1, 2, 0]])
    before = losses(first)
    for j in range(6):
        after = losses(first.index_fill(1, torch.tensor([j]), 1 if j != 3 else 2))
        assert torch.equal(after[:, :j], before[:, :j])
        assert ((after[:, j + 1:] - before[:, j + 1:]).abs() > 1e-6).all(), "everything behind it sees the change"


@pytest.mark.parametrize("method", [Autoregressive(), AutoregressiveTree()])
def test_count_scores_the_whole_row_and_drop_the_beginning(method):
    """drop is -log of the probability that a text begins so: the sum over everything that may follow."""
    size, pad = 4, 3
    assembly = build(method, Tree.star(size) if method.flat else Tree.from_nested(TREES[size]), pad_id=pad)
    assert assembly.objective.is_bound and not assembly.objective.with_pad("drop").is_bound
    for text in ([0, 2], [1]):
        row = torch.tensor([text + [pad] * (3 - len(text))])
        follows = everything(size, 3 - len(text))
        rows = torch.cat([torch.tensor([text]).expand(len(follows), -1), follows], 1)
        begins = torch.exp(-score(assembly, rows)).sum()
        counted, dropped = score(assembly, row), score(assembly, row, "drop")
        assert float(torch.exp(-dropped)) == pytest.approx(float(begins), rel=1e-6)
        assert dropped < counted - 1e-3, "smaller than -log p(x), and therefore no bound"
    whole = torch.tensor([[0, 2, 1]])
    assert torch.equal(score(assembly, whole), score(assembly, whole, "drop")), "without PAD the modes agree"


def test_pad_in_training():
    """count asks the head about PAD, drop does not; both are means over all positions."""
    tokens = torch.tensor([[0, 2, 3, 3]])
    for pad, terms in (("count", 4), ("drop", 2)):
        assembly = build(Autoregressive(pad=pad), Tree.star(4), pad_id=3)
        loss = assembly.objective.loss(assembly.model, tokens, draws=draws(1))
        assert float(loss.train.detach()) * 4 == pytest.approx(float(loss.bound), rel=1e-6)
        assert loss.parts["tokens"].tolist() == [2]
        network = Recorded(assembly.model)
        assembly.objective.loss(network, tokens, draws=draws(1))
        assert len(network.head.given) == terms
    only_pad = torch.full((1, 4), 3)
    assert float(score(assembly, only_pad)) == 0


def test_given_length_has_no_honest_value():
    with pytest.raises(ConfigError, match="meets the length last"):
        build(Autoregressive(), Tree.star(4)).objective.with_pad("given-length")
    with pytest.raises(ConfigError, match="pad"):
        from_json(object, {"kind": "ar", "pad": "given-length"})


def test_an_exact_number_is_computed_once_and_has_no_error():
    assembly = build(Autoregressive(), Tree.star(4), pad_id=3)
    asked = []
    assembly.model.backbone.register_forward_hook(lambda *_: asked.append(1))
    rows = everything(4, 3)
    for repeats in (1, 2, 8):
        asked.clear()
        bound = evaluate_bound(assembly.model, assembly.objective, rows, batch=20, seed=0, repeats=repeats)
        assert len(asked) == 4, "one pass over 64 rows in batches of 20"
        assert (bound.error, bound.level_errors, bound.repeats, bound.estimator) == (0.0, [0.0], 1, "exact")
        assert bound.nats == pytest.approx(float(score(assembly, rows).sum()) / bound.tokens, rel=1e-9)
        assert bound.is_bound and bound.pad == "count"


# --- sampling -----------------------------------------------------------------------------------------------------------

def frequencies(tokens: Tensor, size: int) -> Tensor:
    code = (tokens * size ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
    return torch.bincount(code, minlength=size ** tokens.shape[1]).double()


def within_five_sigma(count: Tensor, p: Tensor) -> bool:
    """Every outcome that is expected ten times or more, and all rarer ones together."""
    n = count.sum()
    rare = n * p < 10
    count, p = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (count, p))
    return bool(((count - n * p).abs() <= 5 * torch.sqrt(n * p * (1 - p)) + 1e-6).all())


def sample(assembly: Assembly, shape: tuple[int, int], seed: int = 1, **options: Any) -> Any:
    return assembly.objective.sample(assembly.model, shape, steps=options.pop("steps", shape[1]),
                                     draws=draws(shape[0], seed), **options)


def worlds() -> list[tuple[Any, Tree]]:
    return [(Autoregressive(), Tree.star(4)), (Autoregressive(Adaptive((1, 2))), Tree.star(4)),
            (AutoregressiveTree(), Tree.from_nested(TREES[4])), (AutoregressiveTree(Shared()), Tree.from_nested(TREES[5]))]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize(("method", "tree"), worlds())
def test_the_sampler_follows_the_enumerated_law(method, tree, style):
    assembly = build(method, tree, style=style)
    law = torch.exp(-score(assembly, everything(tree.size, 3)))
    drawn = sample(assembly, (20_000, 3))
    assert within_five_sigma(frequencies(drawn.tokens, tree.size), law)
    assert not within_five_sigma(frequencies(drawn.tokens, tree.size), law.flip(0)), "the test can fail"


def test_behind_a_prompt_it_follows_the_conditional_law():
    assembly = build(AutoregressiveTree(), Tree.from_nested(TREES[4]))
    law = torch.exp(-score(assembly, everything(4, 3))).view(4, 4, 4)
    drawn = sample(assembly, (20_000, 3), prefix=torch.tensor([2]))
    assert (drawn.tokens[:, 0] == 2).all() and drawn.evaluations.tolist() == [2] * 20_000 and drawn.calls == 2
    assert within_five_sigma(frequencies(drawn.tokens[:, 1:], 4), (law[2] / law[2].sum()).flatten())


@pytest.mark.parametrize("choice", [Choice(temperature=0.5), Choice(top_p=0.6), Choice(min_p=0.3), Choice(temperature=0.0)])
def test_temperature_and_truncation_act_on_every_choice(choice):
    for method, tree in worlds():
        assembly = build(method, tree, seed=3)
        with torch.no_grad():
            hidden = assembly.model.hidden(torch.tensor([[tree.root]]), torch.zeros(1), None)[0]
            expected = torch.ones(tree.size, dtype=torch.float64)
            for level in range(tree.height):
                p = choice.probabilities(assembly.model.head.log_probs(hidden.expand(tree.size, -1), tree.ancestor[level + 1]
                                         .clamp(min=tree.size)))
                free = tree.num_children[tree.ancestor[level + 1]] > 1
                expected *= torch.where(free, p.gather(1, tree.slot[level][:, None])[:, 0], 1.0)
        assert float(expected.sum()) == pytest.approx(1)
        assert within_five_sigma(frequencies(sample(assembly, (4000, 1), choice=choice).tokens, tree.size), expected)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_the_cache_gives_the_samples_of_a_network_that_reads_everything_again(style):
    assembly = build(AutoregressiveTree(), Tree.from_nested(TREES[5]), style=style)
    reads = []
    assembly.model.backbone.register_forward_hook(lambda module, given, out: reads.append(given[0].shape[1]))
    prompt = torch.tensor([1, 4, 0])
    cached = sample(assembly, (50, 8), prefix=prompt)
    assert reads == [4, 1, 1, 1, 1], "the root and the prompt in one call, then one token after another"
    again = assembly.objective.sample(Forgetful(assembly.model), (50, 8), steps=8, draws=draws(50), prefix=prompt)
    assert reads[5:] == [4, 5, 6, 7, 8] and torch.equal(cached.tokens, again.tokens)


def test_prompts_of_different_lengths():
    """Each row is what it would be alone, and pays for its own new tokens only."""
    assembly = build(Autoregressive(), Tree.star(5))
    given = torch.tensor([[-1] * 6, [3, -1, -1, -1, -1, -1], [1, 4, 2, 0, -1, -1], [0, 1, 2, 3, 4, 0]])
    drawn = sample(assembly, (4, 6), given=given)
    assert torch.equal(drawn.tokens[given >= 0], given[given >= 0])
    assert drawn.evaluations.tolist() == [6, 5, 2, 0] and drawn.calls == drawn.steps == 6
    for row in range(4):
        alone = assembly.objective.sample(assembly.model, (1, 6), steps=6, given=given[row: row + 1],
                                          draws=Draws(1, 0, "ar", torch.tensor([row])))
        assert torch.equal(alone.tokens[0], drawn.tokens[row])
    complete = sample(assembly, (1, 6), given=given[3:])
    assert complete.calls == 0 and torch.equal(complete.tokens, given[3:])


@pytest.mark.parametrize("steps", [1, 6, 100])
def test_a_token_takes_one_evaluation_whatever_the_steps(steps):
    assembly = build(AutoregressiveTree(), Tree.from_nested(TREES[4]))
    drawn = sample(assembly, (3, 6), steps=steps)
    assert drawn.evaluations.tolist() == [6] * 3 and drawn.calls == drawn.steps == 6
    assert torch.equal(drawn.tokens, sample(assembly, (3, 6)).tokens)


def test_a_trace_shows_one_token_after_another():
    assembly = build(AutoregressiveTree(), Tree.from_nested(TREES[4]))
    told = []
    drawn = sample(assembly, (2, 5), prefix=torch.tensor([2]), trace=True, progress=lambda *counted: told.append(counted))
    root, height, final = assembly.objective.tree.root, 3, drawn.tokens[0].tolist()
    for made, frame in enumerate(drawn.frames, 1):
        assert frame.nodes == final[:made] + [root] * (5 - made) and frame.heights == [0] * made + [height] * (5 - made)
        assert frame.time == pytest.approx(1 - made / 5) and frame.evaluations == made - 1
    assert len(drawn.frames) == 5 and told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(("options", "match"), [
    ({"given": torch.tensor([[-1, -1, -1], [1, -1, 2]])}, "look ahead.*sample 1 has one behind a gap at position 1"),
    ({"prefix": torch.tensor([0]), "given": torch.tensor([[-1, -1, 2], [1, -1, -1]])}, "look ahead"),
    ({"per_level": [3]}, "no time to divide"), ({"times": [1.0, 0.0]}, "no time to divide"),
    ({"shown": torch.ones(2, 3, dtype=torch.bool)}, "leave out the tokens to be shown"),
    ({"prefix": torch.tensor([0, 1, 2, 3])}, "more than the length"), ({"prefix": torch.tensor([4])}, "outside the vocabulary")])
def test_requests_that_cannot_be_met(options, match):
    with pytest.raises(SampleError, match=match):
        sample(build(Autoregressive(), Tree.star(4)), (2, 3), **options)


def test_training_finds_the_law():
    """Sequences in which the next token follows from the one before: the bound falls to the entropy of the first."""
    assembly = build(AutoregressiveTree(), Tree.from_nested([[0, 1], [2, 3]]))
    rows = torch.tensor([[i, (i + 1) % 4, (i + 2) % 4] for i in range(4)])
    optimizer = torch.optim.Adam(assembly.model.parameters(), lr=0.02)
    for _ in range(150):
        loss = assembly.objective.loss(assembly.model, rows, draws=draws(4))
        optimizer.zero_grad()
        loss.train.backward()
        optimizer.step()
    assert float(loss.bound.mean()) == pytest.approx(math.log(4), abs=0.05)
