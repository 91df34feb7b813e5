"""Every system trains on the same small corpus by one command, and knows more than how often tokens occur."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdlm.errors import ConfigError
from tdlm.study import conduct, study
from tdlm.study.named import METHODS, RIVALS
from tdlm.train.metrics import Quiet

NAMES = list(METHODS)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs of a worker: data and tree are made once."""
    return tmp_path_factory.mktemp("rivals")


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_trains_and_beats_the_unigram_model(name: str, place: Path) -> None:
    result = conduct(RIVALS, place, only=[name], device="cpu", say=lambda line: None, command="test", progress=Quiet)
    score = result["scores"][name]
    assert score["is_a_bound"] and score["pad"] == "pack"
    assert score["bound"] + 3 * score["error"] < score["ngrams"]["unigram"]
    assert score["bound"] > 1, "nobody knows three novels that well after four hundred steps"


def test_what_is_done_is_not_done_again_and_all_runs_are_compared(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ar-tree", "mdlm-tied"]
    conduct(RIVALS, place, only=names, device="cpu", say=lambda line: None, command="test", progress=Quiet)
    monkeypatch.setattr("tdlm.train.step.Trainer.update", lambda *a: pytest.fail("a finished run was trained again"))
    monkeypatch.setattr("tdlm.study.engine.evaluate_run", lambda *a, **k: pytest.fail("evaluated again"))
    said: list[str] = []
    result = conduct(RIVALS, place, only=names, device="cpu", say=said.append, command="test", progress=Quiet)
    assert sorted(result["scores"]) == names and not result["differences"]
    kept = json.loads((place / "study.json").read_text(encoding="utf-8"))
    assert kept["scores"].keys() == result["scores"].keys()
    table = Path(result["files"]["md"]).read_text(encoding="utf-8")
    assert all(f"toy-{name}" in table or name in table for name in names)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rivals'"):
        study("rival")
    with pytest.raises(ConfigError, match="no run 'mdml'"):
        conduct(RIVALS, tmp_path, only=["mdml"], say=print)
    with pytest.raises(ConfigError, match="needs --data"):
        conduct(RIVALS, tmp_path, size="full", say=print)
    assert not any(tmp_path.iterdir())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the folder of a run"):
        conduct(RIVALS, tmp_path, say=print)


def test_the_full_study_holds_the_papers_baselines() -> None:
    entries = RIVALS.entries("full")
    positions = {entry.config.train.steps * entry.config.train.batch * entry.config.data.length for entry in entries}
    assert positions == {131_072_000_000}
    assert all((entry.tree is None) == entry.config.method.flat for entry in entries)
