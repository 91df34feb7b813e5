"""What makes the samplers fast changes nothing: the same numbers give the same tokens as without any haste."""
from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import dense_gidd
from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig
from tdlm.model.head import Tied
from tdlm.objectives import GiddMethod, JointMethod, MdlmMethod, TreeMethod
from tdlm.process import Cascade, Cosine, Overlapping
from tdlm.process.flat import Hybrid
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.sample import Choice, draw, plan, replay, walk
from tdlm.sample.draw import invert
from tdlm.sample.flat import generate_flat
from tdlm.tree import Tree
from tests.flat_worlds import Table, arbitrary, objective
from tests.proofs import slow_samplers as slow
from tests.worlds import TableModel, random_predictor

FLOAT = torch.float64
EVEN = [[0, 1, 2], [3, 4], [5, 6, 7]]
PADDED = [0, [1, [2, 3]], [[[4]]], [5, 6, [7, 8]]]
STAR = list(range(9))
CHAINED = [[[0], [1], [2]], [[3], [4]]]


def network(method: Any, tree: Tree, conditioning: Any, dtype: torch.dtype = FLOAT, device: str = "cpu") -> Assembly:
    """A small transformer with arbitrary weights."""
    backbone = BackboneConfig(blocks=2, width=32, heads=2, conditioning=conditioning)
    config = replace(recipe("small"), method=method, backbone=backbone)
    made = assemble(config, tree, pad_id=None, device=device)
    made.model.to(dtype)
    for number, weight in enumerate(made.model.parameters()):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=FLOAT)
        weight.data.add_(0.3 * noise.to(weight))
    return made


def rows(count: int) -> Draws:
    return Draws(3, 0, "fast", torch.arange(count))


@pytest.mark.parametrize("nested", [EVEN, PADDED, STAR, CHAINED], ids=["even", "padded", "star", "chained"])
@pytest.mark.parametrize("process,conditioning", [(Cascade(), "level"), (Cascade(Cosine()), "time"), (Cascade(), "none"),
                                                  (Overlapping(), "none"), (Overlapping(), "time")])
def test_the_tree_sampler_says_what_the_slow_one_says(nested, process, conditioning):
    tree = Tree.from_nested(nested)
    side = network(TreeMethod(process=process, head=Tied()), tree, conditioning)
    given = torch.full((3, 5), -1)
    given[0, 1], given[1, :2], given[2, 4] = 3, tree.size - 2, 0
    options: list[dict[str, Any]] = [{}, {"given": given}, {"times": [1.0, 0.7, 0.2, 0.0], "choice": Choice(0.8, top_p=0.9)}]
    for each in options:
        fast = side.objective.sample(side.model, (3, 5), steps=9, draws=rows(3), **each)
        tokens, evaluations = slow.ancestral(side.model, process, tree, (3, 5), 9, rows(3), **each)
        assert fast.tokens.tolist() == tokens and fast.evaluations.tolist() == evaluations


METHODS = [TreeMethod(head=Tied()), TreeMethod(process=Overlapping()), JointMethod(Cascade(), 2, mode="unit"),
           JointMethod(Cascade(), 2, mode="marginal")]


@pytest.mark.parametrize("method", METHODS, ids=lambda each: str(each)[:40])
@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "confidence"])
def test_what_is_known_by_height_is_what_the_nodes_say(method, sampler, monkeypatch):
    """Given, shown and missing tokens side by side; every row comes out as it does by itself."""
    side = network(method, Tree.from_nested(EVEN), "none")
    given = torch.full((4, 7), -1)
    given[0, 1], given[1, :3], given[3, ::2], shown = 3, 6, 2, torch.zeros(4, 7, dtype=torch.bool)
    shown[0, 1], shown[3, 2] = True, True

    def made(chosen: slice) -> tuple[list[list[int]], list[int]]:
        drawn = side.objective.sample(side.model, (len(given[chosen]), 7), steps=9, given=given[chosen], shown=shown[chosen],
                                      draws=rows(4).part(chosen), sampler=sampler)
        return drawn.tokens.tolist(), drawn.evaluations.tolist()

    known = made(slice(0, 4))
    for row in range(4):
        assert made(slice(row, row + 1)) == (known[0][row:row + 1], known[1][row:row + 1])
    monkeypatch.setattr(walk, "choices_by_height", lambda tree: None)
    assert made(slice(0, 4)) == known


class Listening:
    """A network that writes down how many sequences it was asked about."""

    def __init__(self, model: Any):
        self.model, self.head, self.told_time, self.sizes = model, model.head, model.told_time, list[int]()

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        self.sizes.append(len(nodes))
        return self.model.hidden(nodes, time, level)


@pytest.mark.parametrize("method,conditioning", [(TreeMethod(head=Tied()), "level"), (TreeMethod(process=Overlapping()), "time"),
                                                 (GiddMethod(p_uniform=0.2), "time")], ids=lambda each: str(each)[:12])
@pytest.mark.parametrize("steps", [6, 200])
def test_sequences_do_not_wait_for_one_another(method, conditioning, steps):
    """Batches are full until the first sequence has arrived, and there are no more calls than one sequence takes evaluations;
    the way down of a sequence, frame by frame, is the one that it goes alone."""
    side = network(method, Tree.star(8) if method.flat else Tree.from_nested(EVEN), conditioning)
    given = torch.full((5, 6), -1)
    given[0, 2], given[3, 1:] = 4, 6
    model = Listening(side.model)
    told: list[tuple[int, int]] = []
    whole = side.objective.sample(model, (5, 6), steps=steps, draws=rows(5), given=given, trace=True,
                                  progress=lambda *each: told.append(each))
    evaluations = whole.evaluations.tolist()
    assert model.sizes == [sum(each > k for each in evaluations) for k in range(max(evaluations))]
    assert told == sorted(told) and told[-1] == (steps, steps) and (steps < 9 or max(evaluations) < steps / 2)
    alone = side.objective.sample(side.model, (1, 6), steps=steps, draws=rows(1), given=given[:1], trace=True)
    assert whole.frames == alone.frames and len(alone.frames) > 3 and alone.frames[-1].heights == [0] * 6
    assert [frame.time for frame in alone.frames] == sorted({frame.time for frame in alone.frames}, reverse=True)


def test_a_network_is_asked_about_few_sizes(monkeypatch):
    """What fills a batch up changes no answer."""
    counts, sizes_of_99 = (1, 2, 3, 5, 9, 16, 17, 24, 25, 96, 97), [1, 2, 4, 8, 16, 16, 24, 24, 32, 96, 99]
    assert [replay.round_up(count, 99) for count in counts] == sizes_of_99
    monkeypatch.setattr(replay, "rounded", lambda nodes: True)

    class Echo:
        head, told_time = network(TreeMethod(), Tree.from_nested(EVEN), "none").model.head, False

        def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
            sizes.append(len(nodes))
            return torch.stack([nodes.double(), (nodes + time[:, None]) if level is None else nodes * level[:, None]], -1)

    for level in (None, torch.arange(40)):
        sizes: list[int] = []
        asked = replay.Replay(Echo(), 37)
        for count in range(1, 38):
            part = torch.arange(count * 3).view(count, 3), torch.arange(count).double(), None if level is None else level[:count]
            assert torch.equal(asked.hidden(*part), Echo().hidden(*part))
        assert set(sizes[::2]) == {1, 2, 4, 8, 16, 24, 32, 37}


@pytest.mark.parametrize("method", [TreeMethod(), JointMethod(Cascade(), 2), GiddMethod(p_uniform=0.2)],
                         ids=lambda each: str(each)[:12])
def test_filled_batches_give_the_same_samples(method, monkeypatch):
    tree = Tree.star(7) if method.flat else Tree.from_nested(EVEN)
    side = network(method, tree, "time" if method.flat else "none")

    def made() -> tuple[list[list[int]], list[int], set[int]]:
        model = Listening(side.model)
        drawn = side.objective.sample(model, (7, 5), steps=30, draws=rows(7))
        return drawn.tokens.tolist(), drawn.evaluations.tolist(), set(model.sizes)

    plain = made()
    monkeypatch.setattr(replay, "rounded", lambda nodes: True)
    filled = made()
    assert filled[:2] == plain[:2] and filled[2] <= {1, 2, 4, 7} and plain[2] - filled[2]


@pytest.mark.parametrize("fused", [None, "fast"])
@pytest.mark.parametrize("method,conditioning", [(TreeMethod(head=Tied()), "level"), (TreeMethod(process=Overlapping()), "none"),
                                                 (GiddMethod(p_uniform=0.2), "time")], ids=lambda each: str(each)[:12])
def test_the_last_block_is_made_where_it_is_needed(method, conditioning, fused, monkeypatch):
    side = network(method, Tree.star(7) if method.flat else Tree.from_nested(EVEN), conditioning)
    side.model.backbone.fused = fused
    widths: list[int] = []
    plain = type(side.model).hidden_at

    def counted(self: Any, nodes: Tensor, time: Tensor, level: Tensor | None, columns: Tensor) -> Tensor:
        widths.append(columns.shape[1])
        return plain(self, nodes, time, level, columns)

    def made(steps: int) -> list[list[int]]:
        return side.objective.sample(side.model, (3, 40), steps=steps, draws=rows(3)).tokens.tolist()

    monkeypatch.setattr(type(side.model), "hidden_at", counted)
    few = [made(60), made(5)]
    assert set(widths) == {8, 16}
    monkeypatch.setattr(plan, "FEW", 64)
    widths.clear()
    assert few == [made(60), made(5)] and not widths


@pytest.mark.parametrize("p_uniform", [0.0, 0.3])
@pytest.mark.parametrize("conditioning", ["time", "none"])
def test_the_gidd_sampler_says_what_the_slow_one_says(p_uniform, conditioning):
    side = network(GiddMethod(p_uniform=p_uniform), Tree.star(7), conditioning)
    process, given = Hybrid(7, p_uniform), torch.full((3, 6), -1)
    given[0, 1], given[2, :3] = 3, 6
    for grid in ([1 - k / 12 for k in range(12)] + [0.0], [1.0, 0.6, 0.1, 0.0], [1.0, 0.0]):
        for each in ({}, {"given": given, "choice": Choice(0.6, min_p=0.05)}):
            fast = side.objective.sample(side.model, (3, 6), steps=9, times=grid, draws=rows(3), **each)
            assert fast.tokens.tolist() == slow.gidd(side.model, process, (3, 6), grid, rows(3), **each)


def test_most_positions_of_gidd_never_reach_the_head():
    class Counting:
        seen = 0

        def log_probs(self, hidden: Tensor, parent: Tensor) -> Tensor:
            self.seen += len(parent)
            return hidden.log_softmax(-1)

    for p_uniform, share in ((0.0, 1 / 64), (0.2, 0.15)):
        model = Table(arbitrary(5, 1))
        model.head = head = Counting()
        drawn = objective(GiddMethod(p_uniform=p_uniform), 5).sample(model, (8, 6), steps=64, draws=rows(8))
        assert head.seen <= share * 8 * 6 * 64 and model.seen == int(drawn.evaluations.sum())
        assert p_uniform or head.seen == 8 * 6, "without noise every position asks once"


@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "confidence"])
def test_distributions_over_a_star_are_made_in_parts(sampler, monkeypatch):
    """Never more than LIMIT entries of one at a time, whatever the sampler and however few the steps."""
    side = network(MdlmMethod(), Tree.from_nested(STAR), "none")
    asked: list[int] = []
    plain = type(side.model.head).log_probs

    def counted(self: Any, hidden: Tensor, parent: Tensor) -> Tensor:
        asked.append(len(parent))
        return plain(self, hidden, parent)

    monkeypatch.setattr(type(side.model.head), "log_probs", counted)
    whole = side.objective.sample(side.model, (6, 8), steps=3, draws=rows(6), sampler=sampler)
    assert max(asked) > 10
    asked.clear()
    monkeypatch.setattr(draw, "LIMIT", 4 * 9)
    parts = side.objective.sample(side.model, (6, 8), steps=3, draws=rows(6), sampler=sampler)
    assert max(asked) == 4 and torch.equal(parts.tokens, whole.tokens)


@pytest.mark.parametrize("count", [draw.WIDE, draw.WIDE + 1, 2 * draw.WIDE + draw.STRETCH - 1])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_wide_distributions_are_inverted_like_narrow_ones(count, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(count)
    p = torch.rand(40, count, generator=generator, dtype=dtype) ** 8
    p[::2, :700], p[1::2, -700:] = 0, 0
    p[5] = 0
    p[5, count - 1] = 1
    p[6] = 0
    p[6, 300] = 1e-30
    uniform = rows(40).uniform("u")
    uniform[::3] = torch.tensor([2.0**-54, 1 - 2.0**-53]).double().repeat(7)
    wide = invert(p, uniform)
    monkeypatch.setattr(draw, "WIDE", 10**9)
    assert torch.equal(wide, invert(p, uniform))
    assert bool((p.gather(1, wide[:, None]) > 0).all())


def test_an_edge_belongs_to_the_outcome_above_it():
    for count in (4, draw.WIDE):
        p = torch.zeros(2, count, dtype=FLOAT)
        p[:, 1], p[:, 3] = 0.25, 0.75
        assert invert(p, torch.tensor([0.25, 0.25 - 2.0**-54], dtype=FLOAT)).tolist() == [3, 1]


def test_a_plain_wide_distribution_keeps_its_precision():
    raw = torch.randn(3, draw.WIDE, generator=torch.Generator().manual_seed(1)) + 2
    p = Choice().probabilities(raw)
    assert p.dtype == torch.float32 and torch.allclose(p, raw.softmax(-1))
    assert Choice(top_p=0.9).probabilities(raw).dtype == FLOAT
    assert torch.allclose(Choice(min_p=1e-9).probabilities(raw).float(), p)


def test_the_dense_rival_of_the_benchmark_draws_from_the_same_distribution():
    """Stretch by stretch from the logits of a padded matrix, as from the whole row."""
    logits = torch.full((30, 2 * dense_gidd.ALIGNED), -torch.inf)
    logits[:, :5000] = 4 * torch.randn(30, 5000, generator=torch.Generator().manual_seed(0))
    logits[1, :300], own, uniform = -torch.inf, torch.arange(30) * 7, rows(30).uniform("u")
    share, token = dense_gidd.drawing(logits, own)
    p = logits.double().softmax(1)
    assert torch.allclose(share, p.gather(1, own[:, None])[:, 0], rtol=1e-5)
    assert torch.equal(token(uniform), invert(p, uniform))


@pytest.mark.parametrize("p_uniform", [0.0, 0.3])
def test_the_dense_rival_of_the_benchmark_is_the_same_sampler(p_uniform, monkeypatch):
    side, grid = network(GiddMethod(p_uniform=p_uniform), Tree.star(7), "time"), [1.0, 0.8, 0.5, 0.3, 0.1, 0.0]
    rule = dense_gidd.Everywhere(Hybrid(7, p_uniform))
    monkeypatch.setattr(dense_gidd, "padded", lambda head: exactly(head))
    dense = generate_flat(side.model, rule, side.objective.tree, (3, 6), steps=5, times=grid, draws=rows(3))
    assert dense.evaluations.tolist() == [5] * 3
    assert dense.tokens.tolist() == slow.gidd(side.model, Hybrid(7, p_uniform), (3, 6), grid, rows(3))


def exactly(head: Any) -> tuple[Tensor, Tensor]:
    """The rival's padded matrix in float64."""
    weight, bias, _ = head.wide()
    matrix, offset = torch.zeros(dense_gidd.ALIGNED, weight.shape[1], dtype=FLOAT), torch.full((dense_gidd.ALIGNED,), -torch.inf)
    matrix[:7], offset[:7] = weight, bias
    return matrix, offset.double()


def recording(monkeypatch, record) -> None:
    monkeypatch.setattr(replay, "recordable", lambda nodes: len(nodes) < 4)
    monkeypatch.setattr(replay, "record", record)


def sampled(count: int) -> tuple[list[list[int]], int]:
    tree = Tree.from_nested(EVEN)
    model = TableModel(tree, random_predictor(tree, 1))
    tokens = TreeMethod().objective(tree, None).sample(model, (count, 5), steps=40, draws=rows(count)).tokens.tolist()
    return tokens, model.asked


def test_a_recording_answers_for_the_network(monkeypatch):
    """Every shape is recorded once and answers from then on; large batches are never recorded."""
    shapes: list[tuple[int, ...]] = []

    def record(call, *inputs):
        shapes.append(tuple(inputs[0].shape))
        return call

    plain, _ = sampled(3)
    recording(monkeypatch, record)
    assert sampled(3)[0] == plain and shapes and len(set(shapes)) == len(shapes)
    shapes.clear()
    monkeypatch.setattr(replay, "recordable", lambda nodes: False)
    assert sampled(3)[0] == plain and not shapes


def test_a_recording_that_fails_or_says_something_else_is_not_used(monkeypatch):
    plain, _ = sampled(2)
    tried: list[int] = []

    def wrong(call, *inputs):
        tried.append(1)
        return lambda *values: call(*values).flip(-1)

    recording(monkeypatch, wrong)
    assert sampled(2)[0] == plain and len(tried) == 1

    def impossible(call, *inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recording(monkeypatch, impossible)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: operation not permitted when stream is capturing$"):
        assert sampled(2)[0] == plain


@pytest.mark.gpu
@pytest.mark.parametrize("method,conditioning", [(TreeMethod(), "level"), (TreeMethod(process=Overlapping()), "none"),
                                                 (GiddMethod(), "time"), (MdlmMethod(), "none")], ids=lambda each: str(each)[:12])
@pytest.mark.parametrize("fused", [None, "fast"])
def test_on_a_gpu_nobody_waits_and_a_recording_says_the_same(method, conditioning, fused, monkeypatch):
    side = network(method, Tree.star(8) if method.flat else Tree.from_nested(EVEN), conditioning, torch.float32, "cuda")
    side.model.backbone.fused = fused

    def watched(done: int, total: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if done < total else "default")

    def made(**options: Any) -> Tensor:
        return side.objective.sample(side.model, (4, 32), steps=40, draws=rows(4), **options).tokens

    monkeypatch.setattr(replay, "TOKENS", 0)
    try:
        plain = made(progress=watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.undo()
    recorded: list[int] = []
    real = replay.record
    monkeypatch.setattr(replay, "record", lambda *each: recorded.append(1) or real(*each))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(made(), plain) and recorded
