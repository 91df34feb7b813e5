"""A run folder from its first step to its last, and everything that may go wrong with it."""
from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tdlm.assemble import assemble
from tdlm.config import RunConfig
from tdlm.data.prepare import prepare
from tdlm.data.store import TokenStore
from tdlm.errors import ConfigError, DataError, RunError, TokenizerError
from tdlm.train import checkpoint, folder
from tdlm.train.loop import choose_device, train
from tdlm.train.metrics import Progress, Quiet, read_metrics
from tdlm.train.plan import complete_tree
from tdlm.train.step import Trainer
from tdlm.tree.tree import Tree

TIMES = ("seconds", "tokens_per_second", "memory")


class Notes(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def update(self, text: str, done: int, total: int) -> None:
        pass


class Stopped(Exception):
    """Stands for a kill in tests that stay in one process."""


def settings(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, train=replace(config.train, **changes))


def go(config: RunConfig, world: dict[str, Path], out: Path, progress: Progress | None = None) -> dict[str, Any]:
    return train(config, **world, out=out, device="cpu", command="tdlm train tiny", progress=progress or Quiet())


def stop_before(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run dies in the update of this step."""
    real = Trainer.update

    def dying(self: Trainer, batches: Any) -> None:
        if self.done == step:
            raise Stopped
        real(self, batches)

    monkeypatch.setattr(Trainer, "update", dying)


def numbers(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMES}
            for record in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> bytes:
    path = checkpoint.latest(out)
    assert path is not None
    return (path / "model.safetensors").read_bytes()


def test_a_whole_run(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "a run with spaces"
    summary = go(config, world, out)
    json.dumps(summary, allow_nan=False)
    assert summary["steps"] == 12 and summary["tokens"] == 12 * 8 * 16
    records = read_metrics(out / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [
        ("train", 1), ("train", 3), ("valid", 5), ("train", 6), ("train", 9), ("valid", 10), ("train", 12),
        ("valid", 12)]
    assert set(records[0]) == {"kind", "step", "loss", "bound", "levels", "lr", "grad_norm", "tokens", "seconds",
                               "tokens_per_second", "memory"}
    assert set(records[2]) == {"kind", "step", "bound", "error", "levels", "tokens"}
    for record in records:
        assert sum(record["levels"]) == pytest.approx(record["bound"])
    assert records[-1]["bound"] < math.log(260)
    assert [path.name for path in checkpoint.checkpoints(out)] == ["step-00000008", "step-00000012"]
    made = json.loads((out / "config.json").read_text())
    assert RunConfig.from_json(made["config"]) == config == folder.read_config(out)
    facts = made["provenance"]
    assert facts["command"] == "tdlm train tiny" and facts["parameters"]["total"] > 0 and facts["versions"]["torch"]
    assert (out / facts["data"]).resolve() == world["data"].resolve()
    assert {"data_fingerprint", "tokenizer_hash", "tree_hash", "device", "started", "commit"} <= set(facts)
    store = TokenStore(world["data"])
    assert Tree.load(out / "tree.safetensors", store.tokenizer.hash).branching == 17
    assert type(store.tokenizer).load(out / "tokenizer.json").hash == store.tokenizer.hash


def test_the_checkpoint_is_the_model(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    go(config, world, tmp_path / "run")
    store = TokenStore(world["data"])
    model = assemble(config, Tree.load(world["tree"]), pad_id=store.tokenizer.pad_id).model
    before = model.backbone.embedding.weight.detach().clone()
    state = checkpoint.load_model(tmp_path / "run", model)
    assert state["step"] == 12 and not torch.equal(before, model.backbone.embedding.weight)


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("step", [2, 4, 7, 11])
def test_a_run_that_died_gives_the_same_curve_and_weights(
        config: RunConfig, world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int,
        ema: float | None) -> None:
    config = settings(config, ema=ema)
    go(config, world, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_before(step, patch)
        with pytest.raises(Stopped):
            go(config, world, tmp_path / "died")
    go(config, world, tmp_path / "died")
    assert numbers(tmp_path / "died") == numbers(tmp_path / "whole")
    for name in ("model", "optimizer", *(["ema"] if ema else [])):
        file = Path("checkpoints", "step-00000012", f"{name}.safetensors")
        assert (tmp_path / "died" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), name
    assert len(json.loads((tmp_path / "died" / "config.json").read_text())["provenance"]["continued"]) == 1


def test_averaged_weights_are_what_is_validated(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    go(config, world, tmp_path / "plain")
    go(settings(config, ema=0.9999), world, tmp_path / "averaged")
    plain, averaged = numbers(tmp_path / "plain"), numbers(tmp_path / "averaged")
    assert [r for r in plain if r["kind"] == "train"] == [r for r in averaged if r["kind"] == "train"]
    assert all(a["bound"] != b["bound"] for a, b in zip(plain, averaged, strict=True) if a["kind"] == "valid")


def test_a_complete_run_says_so_and_changes_nothing(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    first = go(config, world, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    notes = Notes()
    again = go(config, world, tmp_path / "run", notes)
    assert again == first and "complete" in notes.lines[0]
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_cadences_and_micro_batch_may_change(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_before(6, patch)
        with pytest.raises(Stopped):
            go(config, world, tmp_path / "run")
    changed = settings(config, micro_batch=2, log_every=2, valid_every=6, save_every=5, keep=1)
    go(changed, world, tmp_path / "run")
    assert folder.read_config(tmp_path / "run") == changed
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000012"]


def test_another_configuration_is_refused_field_by_field(config: RunConfig, world: dict[str, Path],
                                                         tmp_path: Path) -> None:
    go(config, world, tmp_path / "run")
    other = replace(settings(config, lr=0.02, steps=13, log_every=1), backbone=replace(config.backbone, heads=4))
    with pytest.raises(RunError) as error:
        go(other, world, tmp_path / "run")
    text = str(error.value)
    for part in ("train.lr: 0.01 -> 0.02", "train.steps: 12 -> 13", "backbone.heads: 2 -> 4"):
        assert part in text
    assert "log_every" not in text and "\n" not in text


def test_another_tree_or_data_is_refused(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    go(config, world, tmp_path / "run")
    tree = Tree.load(world["tree"])
    replace(complete_tree(tree.size, 40), tokenizer_hash=tree.tokenizer_hash).save(tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="tree_hash"):
        go(config, {**world, "tree": tmp_path / "other.safetensors"}, tmp_path / "run")
    (tmp_path / "text.jsonl").write_text('{"text": "another corpus"}\n' * 30)
    prepare([tmp_path / "text.jsonl"], tmp_path / "data", tokenizer="bytes", valid=10)
    with pytest.raises(RunError, match="data_fingerprint"):
        go(config, {**world, "data": tmp_path / "data"}, tmp_path / "run")


def test_a_tree_of_another_tokenizer_leaves_no_folder(config: RunConfig, world: dict[str, Path],
                                                      tmp_path: Path) -> None:
    complete_tree(260, 17).save(tmp_path / "other.safetensors")
    with pytest.raises(TokenizerError):
        go(config, {**world, "tree": tmp_path / "other.safetensors"}, tmp_path / "run")
    with pytest.raises(DataError):
        go(config, {**world, "data": tmp_path / "nothing"}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_writers(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    with folder.hold(tmp_path / "run"), pytest.raises(RunError, match="being written by another process"):
        go(config, world, tmp_path / "run")
    go(config, world, tmp_path / "run")


def test_a_folder_that_is_no_run_is_left_alone(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"thesis.tex"):
        go(config, world, tmp_path)
    with pytest.raises(RunError, match="is a file"):
        go(config, world, tmp_path / "thesis.tex")
    with pytest.raises(RunError, match="cannot write"):
        go(config, world, tmp_path / "thesis.tex" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_checkpoint_is_passed_over_and_kept_aside(config: RunConfig, world: dict[str, Path],
                                                            tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(config, world, out)
    curve, final = numbers(out), weights(out)
    broken = out / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 4
    broken.write_bytes(content)
    notes = Notes()
    go(config, world, out, notes)
    assert "warning" in notes.lines[0] and "step-00000012/model.safetensors" in notes.lines[0]
    assert numbers(out) == curve and weights(out) == final
    assert (out / "checkpoints" / "damaged-step-00000012" / "model.safetensors").read_bytes() == bytes(content)


def test_numbers_that_are_not_finite_stop_the_run_before_anything_bad_is_saved(
        config: RunConfig, world: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.update

    def poisoned(self: Trainer, batches: Any) -> None:
        if self.done == 6:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.inf)
        real(self, batches)

    monkeypatch.setattr(Trainer, "update", poisoned)
    with pytest.raises(RunError, match="step 7: the loss or the gradient is not finite"):
        go(config, world, tmp_path / "run")
    found = checkpoint.newest(tmp_path / "run", pytest.fail)
    assert found is not None and found.step == 4
    assert all(bool(torch.isfinite(value).all()) for value in found.tensors("model").values())
    assert max(record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")) < 7


def test_a_full_device_says_what_to_change(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trainer, batches: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Trainer, "update", full)
    with pytest.raises(RunError, match=r"train.micro_batch=2"):
        go(config, world, tmp_path / "run")


def test_a_config_file_that_cannot_be_read(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json cannot be read"):
        go(config, world, tmp_path)


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="unknown device"):
        choose_device("toaster")


def test_global_settings_are_given_back(config: RunConfig, world: dict[str, Path], tmp_path: Path) -> None:
    before, state = torch.get_float32_matmul_precision(), torch.random.get_rng_state()
    go(config, world, tmp_path / "run")
    assert torch.get_float32_matmul_precision() == before and torch.equal(state, torch.random.get_rng_state())


def test_blocks_are_fused_before_the_trainer_looks(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would be launched kernel by kernel while its pace was measured with recorded passes."""
    seen, real = [], Trainer.__init__

    def init(self: Trainer, model: Any, *rest: Any) -> None:
        seen.append(model.backbone.fused)
        real(self, model, *rest)

    def compile_backbone(model: Any, *rest: Any) -> bool:
        model.backbone.fused = "fast"
        return True

    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr("tdlm.train.loop.compile_backbone", compile_backbone)
    go(config, world, tmp_path)
    assert seen == ["fast"]
