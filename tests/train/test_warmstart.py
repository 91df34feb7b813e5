"""A run that begins with the weights of another network: what must be the same function is, and nothing depends on when."""
from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, RunConfig
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import RunError
from tdlm.model.causal import Causal
from tdlm.model.dense import Dense
from tdlm.model.head import Tied
from tdlm.model.model import Model
from tdlm.objectives.ar import Autoregressive
from tdlm.objectives.tree import TreeMethod
from tdlm.train import checkpoint, folder
from tdlm.train.loop import train
from tdlm.train.metrics import Progress, Quiet, read_metrics
from tdlm.train.plan import complete_tree
from tdlm.train.step import Trainer
from tdlm.train.warmstart import Source, must_fit, open_source, warm_start
from tdlm.tree.tree import Tree
from tests.rivals import write_gidd

V, LENGTH = 258, 9
BYTES = Tokenizer.from_bytes()
STAR = Tree.star(V, BYTES.hash)
TREE = replace(complete_tree(V, 17), tokenizer_hash=BYTES.hash)
BACKBONE = BackboneConfig(blocks=2, width=16, heads=2, condition_width=8, conditioning="none")


def configured(method: Any = None, **backbone: Any) -> RunConfig:
    return RunConfig("w", method or TreeMethod(), backbone=replace(BACKBONE, **backbone))


def shaken(config: RunConfig, tree: Tree = STAR, seed: int = 0) -> Model:
    """A network as training leaves it: no weight at its start."""
    model, generator = assemble(config, tree, pad_id=257).model, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def source(config: RunConfig, tree: Tree = STAR, **changes: Any) -> tuple[Model, Source]:
    model = shaken(config, tree)
    tensors = {name: value.clone() for name, value in checkpoint.model_tensors(model).items()}
    return model, Source(**{"name": "them", "hash": "1", "backbone": config.backbone, "head": config.method.head,
                            "tensors": tensors, "tree": tree, **changes})


def started(config: RunConfig, tree: Tree, origin: Source) -> tuple[Model, dict[str, Any]]:
    model = assemble(config, tree, pad_id=257).model.eval()
    return model, warm_start(model, config, tree, origin)


def ids(tree: Tree = STAR) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (3, LENGTH), generator=generator)
    return torch.where(torch.rand(3, LENGTH, generator=generator) < 0.5, tokens, tree.root)


@torch.no_grad()
def hidden(model: Model, nodes: Tensor, time: float = 0.4, level: int = 0) -> Tensor:
    return model.hidden(nodes, torch.full((3,), time), torch.full((3,), level))


@torch.no_grad()
def logits(model: Model, nodes: Tensor, root: int) -> Tensor:
    states = hidden(model, nodes).flatten(0, 1)
    return model.head.log_probs(states, torch.full((len(states),), root))


@pytest.mark.parametrize("conditioning", ["time", "level", "none"])
def test_a_flat_source_gives_a_flat_target_the_same_logits(conditioning: str) -> None:
    config = configured(conditioning=conditioning)
    theirs, origin = source(config)
    ours, taken = started(config, STAR, origin)
    assert torch.equal(logits(ours, ids(), STAR.root), logits(theirs, ids(), STAR.root))
    assert taken["head"] == "taken" and taken["condition"] == "taken" and taken["new_blocks"] == []


@pytest.mark.parametrize(("blocks", "places"), [(3, [2]), (5, [1, 3, 4]), (2, [])])
def test_more_blocks_are_spread_and_begin_as_the_same_function(blocks: int, places: list[int]) -> None:
    theirs, origin = source(configured(conditioning="time"))
    ours, taken = started(configured(conditioning="time", blocks=blocks), STAR, origin)
    assert torch.equal(logits(ours, ids(), STAR.root), logits(theirs, ids(), STAR.root))
    assert taken["new_blocks"] == places


def test_the_depth_of_the_papers_small_from_that_of_gidd() -> None:
    """17 blocks from 12: five new ones, none beside another."""
    theirs, origin = source(configured(blocks=12, conditioning="time"))
    ours, taken = started(configured(blocks=17, conditioning="time"), STAR, origin)
    assert taken["new_blocks"] == [3, 6, 10, 13, 16]
    assert torch.equal(logits(ours, ids(), STAR.root), logits(theirs, ids(), STAR.root))


def test_new_blocks_of_a_left_to_right_network_are_the_identity() -> None:
    for style in ("llama", "gpt2"):
        causal = Causal(style=style, blocks=2, width=16, heads=2, longest=512)
        config = RunConfig("w", Autoregressive(), backbone=causal)
        theirs, origin = source(config)
        ours, taken = started(replace(config, backbone=replace(causal, blocks=3)), STAR, origin)
        assert torch.equal(logits(ours, ids(), STAR.root), logits(theirs, ids(), STAR.root)) and len(taken["new_blocks"]) == 1


@pytest.mark.parametrize("told", [{"conditioning": "time"}, {"conditioning": "level"}, {"condition_width": 4}])
def test_a_source_that_was_told_nothing_keeps_its_function_under_any_condition(told: dict[str, Any]) -> None:
    theirs, origin = source(configured())
    ours, taken = started(configured(**told), STAR, origin)
    assert "mean condition" in taken["condition"]
    assert torch.equal(logits(ours, ids(), STAR.root), logits(theirs, ids(), STAR.root))


def test_another_condition_takes_over_the_mean_of_the_old_one() -> None:
    """The modulations of the target are those of the source, averaged over time."""
    theirs, origin = source(configured(conditioning="time"))
    ours, _ = started(configured(conditioning="level"), STAR, origin)
    times = (torch.arange(1000) + 0.5) / 1000
    with torch.no_grad():
        wanted = theirs.backbone.final_modulation(theirs.backbone.condition(times, None)).mean(0)
        got = ours.backbone.final_modulation(ours.backbone.condition(times[:1], torch.zeros(1, dtype=torch.int64)))[0]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    level_source = source(configured(conditioning="level"), TREE)
    ours, _ = started(configured(conditioning="none"), TREE, level_source[1])
    with torch.no_grad():
        levels = torch.arange(TREE.height)
        wanted = level_source[0].backbone.blocks[1].modulation(level_source[0].backbone.condition(times[:1], levels)).mean(0)
        got = ours.backbone.blocks[1].modulation(ours.backbone.condition(times[:1], None))[0]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_a_tree_target_has_the_tokens_rows_and_means_of_them() -> None:
    theirs, origin = source(configured(conditioning="time"))
    ours, taken = started(configured(conditioning="time"), TREE, origin)
    rows, given = ours.backbone.embedding.weight.detach(), theirs.backbone.embedding.weight.detach()
    assert torch.equal(rows[:V], given[:V]) and torch.equal(rows[TREE.root], given[V])
    for node in range(V, TREE.root):
        below = (TREE.ancestor == node).any(0)
        assert below.any()
        torch.testing.assert_close(rows[node], given[:V][below].mean(0), atol=1e-6, rtol=0)
    assert taken["head"] == "its own start" and bool((ours.predictor.output.weight == 0).all())
    nodes = ids(TREE)
    flat = torch.where(nodes == TREE.root, STAR.root, nodes)
    assert torch.equal(hidden(ours, nodes), hidden(theirs, flat))  # with nothing but tokens and roots it is the same function


def test_the_same_tree_keeps_every_row_and_its_head() -> None:
    for head in (TreeMethod().head, Tied()):
        config = configured(TreeMethod(head=head))
        theirs, origin = source(config, TREE)
        ours, taken = started(config, TREE, origin)
        assert taken["head"] == "taken" and taken["embedding"] == "every node's row"
        for name, value in checkpoint.model_tensors(ours).items():
            same = theirs.state_dict()[name]
            assert torch.equal(value[: TREE.nodes], same[: TREE.nodes]), name


def test_a_flat_source_lends_its_output_rows_to_a_dense_head_on_a_tree() -> None:
    theirs, origin = source(configured(conditioning="time"))
    config = configured(TreeMethod(head=Dense()), conditioning="time")
    ours, taken = started(config, TREE, origin)
    nodes = ids(TREE)
    flat = torch.where(nodes == TREE.root, STAR.root, nodes)
    with torch.no_grad():
        got = ours.head.token_log_probs(hidden(ours, nodes).flatten(0, 1))
    assert taken["head"] == "taken"
    torch.testing.assert_close(got, logits(theirs, flat, STAR.root), atol=1e-5, rtol=0)


def test_another_head_keeps_its_own_start() -> None:
    _, origin = source(configured())
    ours, taken = started(configured(TreeMethod(head=Tied())), STAR, origin)
    assert taken["head"] == "its own start" and bool((ours.predictor.bias == 0).all())


def test_tokens_that_the_source_does_not_know_are_left_alone() -> None:
    theirs, origin = source(configured(), missing=(V - 1,))
    fresh = assemble(configured(), STAR, pad_id=257).model.backbone.embedding.weight
    ours, _ = started(configured(), STAR, origin)
    assert torch.equal(ours.backbone.embedding.weight[V - 1], fresh[V - 1])
    assert torch.equal(ours.backbone.embedding.weight[V], theirs.backbone.embedding.weight[V])
    assert bool((ours.predictor.output.weight[V - 1] == 0).all()) and bool(ours.predictor.output.bias[V - 1] == 0)
    assert torch.equal(ours.predictor.output.weight[: V - 1], theirs.predictor.output.weight[: V - 1])
    tree_model, _ = started(configured(), TREE, origin)
    node = int(TREE.ancestor[1, V - 1])
    below = [token for token in range(V - 1) if int(TREE.ancestor[1, token]) == node]
    wanted = theirs.backbone.embedding.weight.detach()[below].mean(0)
    torch.testing.assert_close(tree_model.backbone.embedding.weight.detach()[node], wanted, atol=1e-6, rtol=0)


# whole runs


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def update(self, text: str, done: int, total: int) -> None:
        pass


class Stopped(Exception):
    """Stands for a kill."""


def go(config: RunConfig, world: dict[str, Path], out: Path, init: Path | str | None,
       progress: Progress | None = None) -> dict[str, Any]:
    return train(config, **world, out=out, device="cpu", command="tdlm train", init=init, progress=progress or Quiet())


def curve(out: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "memory")
    return [{name: value for name, value in line.items() if name not in timed} for line in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> bytes:
    path = checkpoint.latest(out)
    assert path is not None
    return (path / "model.safetensors").read_bytes()


@pytest.fixture
def gidd(tmp_path: Path, config: RunConfig, world: dict[str, Path]) -> Path:
    """A checkpoint with GIDD's names for this configuration's network."""
    return write_gidd(tmp_path / "gidd.safetensors", config.backbone, TokenStore(world["data"]).size)


def test_a_run_begins_with_a_checkpoint_and_continues_to_the_bit(config: RunConfig, world: dict[str, Path], gidd: Path,
                                                                 tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    go(config, world, plain, None)
    go(config, world, whole, gidd)
    assert curve(whole) != curve(plain)
    real = Trainer.update

    def dying(self: Trainer, batches: Any) -> None:
        if self.done == 6:
            raise Stopped
        real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", dying)
        with pytest.raises(Stopped):
            go(config, world, cut, gidd)
    assert checkpoint.latest(cut) is not None
    go(config, world, cut, gidd)
    assert curve(cut) == curve(whole) and weights(cut) == weights(whole)
    facts = (folder.read(whole) or {})["provenance"]
    assert facts["init"].startswith("gidd.safetensors@") and facts["warm_start"]["from"] == "gidd.safetensors"
    assert facts["warm_start"]["head"] == "its own start" and str(tmp_path) not in json.dumps(facts["warm_start"])


def test_a_kill_before_the_first_checkpoint_begins_with_it_again(config: RunConfig, world: dict[str, Path], gidd: Path,
                                                                 tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(config, world, tmp_path / "whole", gidd)

    def dying(self: Trainer, batches: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", dying)
        with pytest.raises(Stopped):
            go(config, world, tmp_path / "cut", gidd)
    go(config, world, tmp_path / "cut", gidd)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_another_init_is_another_run(config: RunConfig, world: dict[str, Path], gidd: Path, tmp_path: Path) -> None:
    out, size = tmp_path / "run", TokenStore(world["data"]).size
    go(config, world, out, gidd)
    other = write_gidd(tmp_path / "other.safetensors", config.backbone, size, seed=2)
    for init in (other, None):
        with pytest.raises(RunError, match=r"init: 'gidd.safetensors@"):
            go(config, world, out, init)
    go(config, world, tmp_path / "plain", None)
    with pytest.raises(RunError, match=r"init: None -> 'gidd.safetensors@"):
        go(config, world, tmp_path / "plain", gidd)
    write_gidd(gidd, config.backbone, size, seed=3)  # other weights under the same name
    with pytest.raises(RunError, match="init:"):
        go(config, world, out, gidd)


def test_a_run_goes_on_when_its_source_is_gone(config: RunConfig, world: dict[str, Path], gidd: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(config, world, out, gidd)
    notes, kept = Notes(), gidd.rename(tmp_path / "elsewhere.safetensors")
    go(config, world, out, gidd, notes)
    assert "goes on without it" in notes.lines[0]
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(RunError, match="no checkpoint"):
        go(config, world, out, gidd)
    kept.rename(gidd)
    go(config, world, out, gidd)


def test_a_run_that_began_at_random_knows_nothing_of_a_source_that_is_not_there(config: RunConfig, world: dict[str, Path],
                                                                                tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what is missing, not that settings differ; also where neither the name nor its folder has a parent."""
    monkeypatch.chdir(tmp_path)
    go(config, world, tmp_path / "run", None)
    for name in ("gone", "some/where/gone.safetensors"):
        with pytest.raises(RunError, match=r"^no checkpoint "):
            go(config, world, tmp_path / "run", name)


def test_a_run_of_ours_begins_another(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    go(replace(config, train=replace(config.train, ema=0.9)), world, first, None)
    go(config, world, second, first)
    averaged = open_source(first, TokenStore(world["data"]).tokenizer)
    at = checkpoint.latest(first)
    assert at is not None and averaged.step == 12 and averaged.label == open_source(at, TokenStore(world["data"]).tokenizer).label
    found = checkpoint.load(at)
    for name, value in averaged.tensors.items():
        assert torch.equal(value, found.tensors("ema")[name]) and not torch.equal(value, found.tensors("model")[name])
    facts = (folder.read(second) or {})["provenance"]["warm_start"]
    assert facts["step"] == 12 and facts["head"] == "taken" and facts["embedding"] == "every node's row"
    assert curve(second)[0]["loss"] < curve(first)[0]["loss"]


def test_what_does_not_fit_is_named_before_anything_is_made(config: RunConfig, world: dict[str, Path], gidd: Path,
                                                            tmp_path: Path) -> None:
    def refused(words: str, changed: RunConfig, init: Path | str = gidd) -> None:
        with pytest.raises(RunError, match=words) as caught:
            go(changed, world, tmp_path / "run", init)
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()

    refused("backbone.width 16, this run 32", replace(config, backbone=replace(config.backbone, width=32)))
    refused("backbone.heads 2, this run 4", replace(config, backbone=replace(config.backbone, heads=4)))
    deep = write_gidd(tmp_path / "deep.safetensors", replace(config.backbone, blocks=3), TokenStore(world["data"]).size)
    refused("has 3 blocks, this run only 1", config, deep)
    small = write_gidd(tmp_path / "small.safetensors", config.backbone, 100)
    refused("another tokenizer", config, small)
    refused("no checkpoint", config, tmp_path / "nothing")
    (tmp_path / "weights.pt").write_bytes(b"\x80\x02")
    refused("no safetensors file", config, tmp_path / "weights.pt")


def test_the_kinds_of_backbone_must_agree() -> None:
    _, origin = source(configured())
    with pytest.raises(RunError, match="backbone dit, this run causal"):
        must_fit(Causal(blocks=2, width=16, heads=2), origin, V)
    llama = replace(origin, backbone=Causal(blocks=2, width=16, heads=2))
    with pytest.raises(RunError, match=r"backbone.style llama, this run gpt2"):
        must_fit(Causal(style="gpt2", blocks=2, width=16, heads=2), llama, V)
