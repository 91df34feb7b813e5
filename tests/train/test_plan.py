"""What a run will cost: counted on the real modules, checked against independent counters."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tdlm.assemble import assemble
from tdlm.cli import parse
from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.errors import ConfigError
from tdlm.model import Dense, PerLevel, Tied
from tdlm.objectives.tree import TreeMethod
from tdlm.rng import Draws
from tdlm.train.card import BUSY, CARDS, GIB, ROOM, choose, divisors, largest
from tdlm.train.memory import predicted_memory, predictor
from tdlm.train.plan import complete_tree, matrix_weights, meta_model, plan, train_flops

SMALL = RunConfig("small", TreeMethod(), backbone=BackboneConfig(blocks=17, width=768, heads=12))
BASE = RunConfig("base", TreeMethod(), backbone=BackboneConfig(blocks=27, width=1024, heads=16))
TINY = RunConfig("tiny", TreeMethod(), data=DataConfig(length=32),
                 backbone=BackboneConfig(2, 64, 4, condition_width=16),
                 train=TrainConfig(steps=10, warmup=0, batch=4, dtype="float32"))


def test_small_has_the_papers_parameters() -> None:
    result = plan(SMALL)
    assert result["parameters"]["blocks"] == 130_520_832
    assert result["parameters"]["elsewhere"] == 39_668_736
    assert result["parameters"]["total"] == 170_189_568
    assert result["tree"]["nodes"] == 50_771 and result["tree"]["embedding_rows"] == 50_816
    assert result["tree"]["height"] == 2 and result["tree"]["internal_nodes"] == 513
    assert result["logits"]["dense"] / result["logits"]["tree"] == result["logits"]["ratio"] == 50_258 / 512
    json.dumps(result, allow_nan=False)


def test_base_has_the_papers_parameters() -> None:
    counts = plan(BASE)["parameters"]
    assert (counts["blocks"], counts["elsewhere"], counts["total"]) == (361_331_712, 52_875_008, 414_206_720)


@pytest.mark.parametrize(("vocabulary", "branching", "height", "internal"), [
    (8, 2, 3, 7), (9, 3, 2, 4), (10, 3, 3, 1 + 3 + 9), (5, 8, 1, 1), (50_258, 37, 3, 1 + 37 + 37**2)])
def test_complete_trees_have_the_sizes_one_expects(vocabulary: int, branching: int, height: int, internal: int) -> None:
    tree = complete_tree(vocabulary, branching).check()
    assert tree.size == vocabulary and tree.height == height and tree.branching == branching
    assert tree.nodes - tree.size <= internal and (vocabulary == 10 or tree.nodes - tree.size == internal)


def test_a_tree_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        complete_tree(1, 4)


def test_flops_agree_with_torchs_own_counter() -> None:
    tree = complete_tree(64, 8)
    model = assemble(TINY, tree, pad_id=None).model
    flops = train_flops(model, TINY)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it counts products
        hidden = model.hidden(torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4), None)
        model.head.log_probs(hidden.reshape(-1, 64), torch.full((128,), tree.root))
    once_a_sequence = counter.get_flop_counts()["Global"]
    conditioning = 2 * 4 * (256 * 16 + 16 * 16 + 2 * 16 * 6 * 64 + 16 * 2 * 64)
    assert sum(once_a_sequence.values()) == 128 * flops["forward"] + conditioning
    assert flops["train"] == 3 * flops["forward"] and flops["matrices"] == 2 * matrix_weights(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_activations_are_what_autograd_keeps(dtype: str) -> None:
    """Fake tensors say what a real forward pass keeps."""
    config = replace(TINY, train=replace(TINY.train, dtype=dtype))
    model = assemble(config, complete_tree(64, 8), pad_id=None).model
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), \
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden = model.hidden(torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4), None)
    real = sum(t.untyped_storage().nbytes() for t in kept.values()) + hidden.untyped_storage().nbytes()
    memory = predicted_memory(config, meta_model(config, complete_tree(64, 8)), 4, fused=False)
    assert memory["activations"] + memory["weight_casts"] == pytest.approx(real, rel=0.05)


def test_memory_without_fused_blocks_is_linear_and_the_parts_add_up() -> None:
    model = meta_model(TINY, complete_tree(64, 8))
    two, four = (predicted_memory(TINY, model, micro, fused=False) for micro in (2, 4))
    assert four["total"] - two["total"] == 2 * two["per_sequence"] and two["fixed"] + 2 * two["per_sequence"] == two["total"]
    total = sum(p.numel() for p in model.parameters())
    assert two["weights"] == 4 * total and two["optimizer"] == 8 * total and two["average"] == 0
    with_average = predicted_memory(replace(TINY, train=replace(TINY.train, ema=0.99)), model, 2, fused=False)
    assert with_average["total"] - two["total"] == 4 * total


def test_a_given_tree_is_used() -> None:
    result = plan(TINY, tree=complete_tree(100, 10))
    assert result["tree"] == {"source": "file", "tokens": 100, "branching": 10, "height": 2, "internal_nodes": 11,
                              "nodes": 111, "embedding_rows": 128}


@pytest.mark.parametrize("head", [Tied(), PerLevel()])
def test_every_head_is_counted(head: Any) -> None:
    counts = plan(replace(TINY, method=TreeMethod(head=head)), vocabulary=100, branching=10)["parameters"]
    assert counts["head"] == (128 if isinstance(head, Tied) else 2 * 65 * 10)
    assert counts["total"] == sum(counts[part] for part in ("blocks", "embedding", "conditioning", "final", "head"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_head_counts_the_vocabulary(tied: bool) -> None:
    config = replace(TINY, method=TreeMethod(head=Dense(tied)))
    dense, shared = (plan(made, vocabulary=100, branching=10, fused=False) for made in (config, TINY))
    assert dense["parameters"]["head"] == (100 if tied else 65 * 100)
    assert dense["flops_per_token"]["head"] == 2 * 64 * 100 == 10 * shared["flops_per_token"]["head"]
    assert dense["memory"]["logits"] == 10 * shared["memory"]["logits"]
    assert dense["logits"]["tree"] == dense["logits"]["dense"] and dense["logits"]["ratio"] == 1


def test_nothing_random_is_touched() -> None:
    before = torch.random.get_rng_state()
    plan(TINY, vocabulary=100, branching=10)
    assert torch.equal(before, torch.random.get_rng_state())
    assert Draws(1, 0, "train", torch.arange(2)).uniform("x", 1).device.type == "cpu"


@pytest.mark.parametrize("typed", ["--branching 64 --data DIR --tree FILE --out RUN", "--dry-run --vocabulary 300 --tree FILE"])
def test_sizes_beside_a_tree_are_refused_and_not_ignored(typed: str) -> None:
    with pytest.raises(ConfigError, match="for --dry-run without --tree"):
        parse(["train", "demo", *typed.split()]).run()


TIED = replace(SMALL, method=TreeMethod(head=Tied()), backbone=BackboneConfig(blocks=12, conditioning="level"))


PRESETS = [(SMALL, 64, "16 lean, 16, 32, 64, 64, 64"), (SMALL, 512, "16 lean, 16, 32, 64, 64, 256"),
           (TIED, 64, "16, 32, 64, 64, 64, 64"), (TIED, 512, "16, 32, 64, 64, 128, 512")]


@pytest.mark.parametrize(("config", "batch", "chosen"), PRESETS)
def test_settings_for_cards_are_those_of_the_documentation(config: RunConfig, batch: int, chosen: str) -> None:
    config = replace(config, train=replace(config.train, batch=batch, stream="bfloat16"))
    cards = plan(config)["cards"]
    found = [f"{card['micro_batch']}{' lean' * (card['memory'] == 'lean')}" for card in cards]
    assert [card["gib"] for card in cards] == list(CARDS) and ", ".join(found) == chosen
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for card in cards:
        row = next(line for line in text.splitlines() if line.startswith(f"| {card['gib']} | ")).split("|")
        cell = row[2 + 2 * (config.backbone == TIED.backbone) + (batch == 512)].strip()
        expected = f"{found[cards.index(card)]}: {card['predicted'] / GIB:.1f}"
        assert cell.replace(" sequences", "").replace(", `lean`", " lean") == expected


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("config", [SMALL, TIED])
def test_every_card_has_its_setting(config: RunConfig, batch: int) -> None:
    """It fits, a larger micro-batch would not, and everything is kept where that leaves enough to do."""
    config = replace(config, train=replace(config.train, batch=batch, stream="bfloat16"))
    model, before = meta_model(config, complete_tree(50_258, 512)), 0
    for size in CARDS:
        choice = choose(config, model, size * GIB, 2)
        assert choice is not None
        train, micro = choice.config.train, choice.memory["micro_batch"]
        assert train.micro_batch in (micro, None) and (train.micro_batch or batch) == micro and batch % micro == 0
        assert choice.memory == predicted_memory(choice.config, model, micro, 2) and choice.memory["total"] <= ROOM * size * GIB
        if micro < batch:
            assert predicted_memory(choice.config, model, 2 * micro, 2)["total"] > ROOM * size * GIB
        if train.memory == "lean":
            kept = replace(choice.config, train=replace(train, memory="fast"))
            assert (largest(predictor(kept, model, 2), batch, size * GIB) or 0) * 512 < BUSY
        assert micro * 512 >= BUSY and micro >= before and choice.config.name == config.name
        before = micro
        if size == 6:
            assert choice.memory["total"] <= 6 * GIB
    assert before >= 64


def test_a_card_that_is_too_small_has_none_and_other_networks_choose_the_micro_batch_alone() -> None:
    assert choose(SMALL, meta_model(SMALL, complete_tree(50_258, 512)), GIB) is None
    config = replace(TINY, train=replace(TINY.train, batch=8))
    plain = choose(config, meta_model(config, complete_tree(64, 8)), 20 * 2**20, fused=False)
    assert plain is not None and plain.config.train.memory == "fast" and "without fused" in plain.memory["means"]


@pytest.mark.parametrize("batch", [1, 7, 64, 360, 99_999_999_999, 10**30])
def test_divisors_of_a_batch_of_any_size(batch: int) -> None:
    found = divisors(batch, 500)
    assert found == [i for i in range(1, min(batch, 500) + 1) if batch % i == 0]
    assert divisors(batch, 0) == []


def test_a_dry_run_of_an_absurd_batch_ends() -> None:
    result = plan(replace(TINY, train=replace(TINY.train, batch=99_999_999_999)), vocabulary=64, branching=8)
    assert all(99_999_999_999 % chip["largest_micro_batch"] == 0 for chip in result["time"]["chips"])
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(("typed", "message"), [
    ("--card 8 --dry-run --set train.memory=lean", "chooses train.memory itself"), ("--card x --dry-run", "number of GiB"),
    ("--card -1 --dry-run", "number of GiB"), ("--card 1 --dry-run", "does not fit"), ("--card 8 --device cpu "
     "--data DIR --tree FILE --out RUN", "memory of a GPU"), ("--card auto --device cpu --dry-run", "there is none")])
def test_a_card_that_cannot_be_had_is_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["train", "small", *typed.split()]).run()


def test_a_card_chooses_and_says_what(capsys: pytest.CaptureFixture[str]) -> None:
    result = parse(["train", "small", "--dry-run", "--card", "8", "--batch", "64", "--json"]).run()
    train = result["config"]["train"]
    assert result["memory"]["micro_batch"] == train["micro_batch"] < 64
    assert f"train.micro_batch={train['micro_batch']}, train.memory={train['memory']}" in capsys.readouterr().err
    own = next(card for card in result["cards"] if card["gib"] == 8)
    assert own == {"gib": 8, "micro_batch": train["micro_batch"], "memory": train["memory"],
                   "predicted": result["memory"]["total"]}
