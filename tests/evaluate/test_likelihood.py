"""The published number: estimators agree, errors are honest, rows may be few."""
from __future__ import annotations

import math

import pytest
import torch

from tdlm.errors import ConfigError
from tdlm.evaluate.likelihood import evaluate_bound
from tdlm.objectives import TreeMethod
from tdlm.process import Cascade, Overlapping
from tdlm.tree import Tree
from tests.worlds import TableModel, uniform_predictor

TREE = Tree.from_nested([[0, 1, 2], [3, [4, 5]], [6, 7]])


class Lopsided(TableModel):
    """Predictions that depend on how many neighbours are visible: both estimators must average over that."""

    def hidden(self, nodes, time, level):
        visible = (nodes < self.head.tree.size).double().mean(1)
        slots = torch.arange(self.head.tree.branching).double()
        return (slots * (visible[:, None, None] - 0.4)).expand(*nodes.shape, -1)


def rows(count: int, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 8, (count, length), generator=torch.Generator().manual_seed(3))


def objective(process=None, pad_id=7):
    return TreeMethod(process=process or Cascade()).objective(TREE, pad_id)


def test_the_two_estimators_agree_within_their_errors():
    model = Lopsided(TREE, None)
    sampled = evaluate_bound(model, objective(), rows(200), batch=64, seed=1, repeats=30, estimator="sampled")
    count = evaluate_bound(model, objective(), rows(200), batch=64, seed=2, repeats=8, estimator="count")
    assert abs(sampled.nats - count.nats) < 4 * math.hypot(sampled.error, count.error)
    for a, b, ea, eb in zip(sampled.levels, count.levels, sampled.level_errors, count.level_errors):
        assert abs(a - b) < 4 * math.hypot(ea, eb)
    assert count.error * math.sqrt(8) < 0.5 * sampled.error * math.sqrt(30), "the count estimator has less noise per repeat"
    assert sampled.levels and sum(sampled.levels) == pytest.approx(sampled.nats)


@pytest.mark.parametrize(("estimator", "repeats", "least"), [("count", 4, 0.5), ("sampled", 4, 0.0), ("sampled", 16, 0.7)])
def test_the_error_covers_the_truth(estimator, repeats, least):
    """Over many seeds the standardised deviation from a long run is not larger than it should be; nor much smaller where many
    repeats tell what stratified times save."""
    model, data = Lopsided(TREE, None), rows(40)
    truth = evaluate_bound(model, objective(), data, batch=40, seed=99, repeats=800, estimator=estimator)
    scores = []
    for seed in range(40):
        short = evaluate_bound(model, objective(), data, batch=40, seed=seed, repeats=repeats, estimator=estimator)
        scores.append((short.nats - truth.nats) / math.hypot(short.error, truth.error))
    spread = math.sqrt(sum(s * s for s in scores) / len(scores))
    assert least < spread < 1.35 and abs(sum(scores) / len(scores)) < 0.6


def test_the_batch_size_does_not_change_the_number():
    model = Lopsided(TREE, None)
    one = evaluate_bound(model, objective(), rows(13), batch=13, seed=1)
    other = evaluate_bound(model, objective(), rows(13), batch=4, seed=1)
    assert one.nats == pytest.approx(other.nats, rel=1e-12) and one.error == pytest.approx(other.error, rel=1e-9)


def test_fewer_rows_than_a_batch_and_a_single_row():
    for count in (1, 3):
        bound = evaluate_bound(Lopsided(TREE, None), objective(), rows(count), batch=64, seed=1)
        assert bound.rows == count and math.isfinite(bound.nats) and bound.error > 0


def test_tokens_exclude_pad_and_the_mode_is_named():
    data = torch.tensor([[6, 6, 6, 7, 7, 7]])  # one cost for all: the count estimator is then exact
    bound = evaluate_bound(TableModel(TREE, uniform_predictor(TREE)), objective(), data, batch=1, seed=0, estimator="count")
    assert bound.tokens == 3 and bound.pad == "count"
    assert bound.nats == pytest.approx(6 * (math.log(3) + math.log(2)) / 3, rel=1e-9), "PAD's terms, over real tokens"
    packed = evaluate_bound(TableModel(TREE, uniform_predictor(TREE)), objective(), data[:, :3], batch=1, seed=0)
    assert packed.pad == "pack"
    dropped = evaluate_bound(TableModel(TREE, uniform_predictor(TREE)), objective().with_pad("drop"), data, batch=1, seed=0)
    assert dropped.to_json()["is_a_bound"] is False


def test_bits_per_byte():
    bound = evaluate_bound(TableModel(TREE, uniform_predictor(TREE)), objective(), rows(3)[:, :4], batch=4, seed=0)
    result = bound.to_json(token_bytes=24)
    assert result["bits_per_byte"] == pytest.approx(bound.nats * bound.tokens / 24 / math.log(2))
    assert result["perplexity"] == pytest.approx(math.exp(bound.nats))


@pytest.mark.parametrize("options,match", [({"repeats": 1}, "repeats"), ({"estimator": "count"}, "estimator 'count'")])
def test_requests_that_cannot_be_met(options, match):
    process = Overlapping() if "estimator" in options else Cascade()
    with pytest.raises(ConfigError, match=match):
        evaluate_bound(Lopsided(TREE, None), objective(process), rows(3), batch=4, seed=0, **options)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate_bound(Lopsided(TREE, None), objective(), rows(0), batch=4, seed=0)
