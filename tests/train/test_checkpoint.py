"""Checkpoints: nothing damaged is ever loaded, nothing whole is ever lost."""
from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tdlm.errors import RunError
from tdlm.train import checkpoint
from tdlm.train.checkpoint import latest, load, load_model, newest, save


def parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((3, 2), float(step)), "bias": torch.arange(3.0)},
            "optimizer": {"step.weight": torch.tensor(float(step))}}


def write(run: Path, *steps: int, keep: int | None = None) -> None:
    for step in steps:
        save(run, step, parts(step), {"seconds": 1.5}, keep=keep)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    write(tmp_path, 7)
    path = latest(tmp_path)
    assert path is not None and path == tmp_path / "checkpoints" / "step-00000007"
    found = load(path)
    assert found.step == 7 and found.state["seconds"] == 1.5 and set(found.names) == {"model", "optimizer"}
    assert torch.equal(found.tensors("model")["weight"], torch.full((3, 2), 7.0))
    assert found.tensors("optimizer")["step.weight"].shape == ()
    assert not any(file.suffix in (".pt", ".pkl", ".bin") for file in path.iterdir())
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "who may read the numbers may read the weights"


def test_sums_that_are_not_finite_come_back(tmp_path: Path) -> None:
    """A bound may be infinite for a moment without ending the run: what is between two progress lines goes on as it was."""
    path = save(tmp_path, 7, parts(7), {"sums": [1.5, math.inf]}, keep=None)
    assert load(path).state["sums"] == [1.5, math.inf]


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and newest(tmp_path, pytest.fail) is None
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_model(tmp_path, nn.Linear(2, 3))


def test_every_single_flipped_bit_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 7)
    path = tmp_path / "checkpoints" / "step-00000007"
    chooser = random.Random(0)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for _ in range(30):
            position, bit = chooser.randrange(len(content)), chooser.randrange(8)
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            if file.name == "manifest.json" and _same_manifest(content, bytes(damaged)):
                continue
            with pytest.raises(RunError, match=r"damaged|missing|manifest|step"):
                load(path)
        file.write_bytes(content)
    load(path)


def _same_manifest(old: bytes, new: bytes) -> bool:
    """Some bits of a JSON file are only white space."""
    try:
        return json.loads(old) == json.loads(new)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "missing", "longer"])
def test_damage_names_the_file(tmp_path: Path, name: str, how: str) -> None:
    write(tmp_path, 7)
    file = tmp_path / "checkpoints" / "step-00000007" / name
    content = file.read_bytes()
    file.unlink() if how == "missing" else file.write_bytes(content[:-3] if how == "cut" else content + b"x")
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        load(file.parent)


def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    write(tmp_path, 7)
    other = tmp_path / "checkpoints" / "step-00000009"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000007", other)
    with pytest.raises(RunError, match="step"):
        load(other)


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    write(tmp_path, 7)
    manifest = tmp_path / "checkpoints" / "step-00000007" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["files"]["../../secret"] = value["files"]["state.json"]
    manifest.write_text(json.dumps(value))
    with pytest.raises(RunError, match="secret"):
        load(manifest.parent)


def test_fall_back_to_the_newest_intact_one_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / "step-00000003" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    found = newest(tmp_path, warnings.append)
    assert found is not None and found.step == 2
    assert len(warnings) == 1 and "step-00000003" in warnings[0] and "model.safetensors" in warnings[0]
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}" / "state.json").unlink()
    with pytest.raises(RunError, match="no intact checkpoint is left"):
        newest(tmp_path, warnings.append)


def test_pruning_keeps_the_newest_and_counts_numbers_not_letters(tmp_path: Path) -> None:
    write(tmp_path, 99_999_999, 100_000_000, 100_000_001, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-100000000", "step-100000001"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-100000000", "step-100000001"]


def test_nothing_is_pruned_when_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, keep=1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match="No space left"):
        write(tmp_path, 2, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    load(tmp_path / "checkpoints" / "step-00000001")


def test_leftovers_of_killed_saves_are_swept_up(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in (".saving-step-00000002", ".discarded-step-00000000"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000001"
    write(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(RunError, match="exists already"):
        write(tmp_path, 1)


def test_load_model_prefers_averaged_weights_and_checks_shapes(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save(tmp_path, 4, {"model": checkpoint.model_tensors(model),
                       "ema": {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}}, {})
    other = nn.Linear(2, 3)
    assert load_model(tmp_path, other)["step"] == 4
    assert torch.equal(other.weight, torch.ones(3, 2))
    load_model(tmp_path / "checkpoints" / "step-00000004", other, ema=False)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(RunError, match="does not fit the model at 'weight'"):
        load_model(tmp_path, nn.Linear(2, 4))


def test_shared_weights_are_saved_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    model, other = Tied(), Tied()
    save(tmp_path, 1, {"model": checkpoint.model_tensors(model)}, {})
    load_model(tmp_path, other)
    assert torch.equal(other.second.weight, model.first.weight)
