"""Ctrl-C, in the middle of each verb that takes time: exit code 130, one word of what is kept, and the same command goes on."""
from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tdlm import console
from tdlm.train.loop import Sitting
from tests.cli.conftest import SMALL, Done, Tdlm, listing


def press(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def stopped(done: Done) -> None:
    assert done.code == 130 and "Traceback" not in done.err and done.err.splitlines()[-1] == "tdlm: stopped", done


def test_prepare(copy: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    command = ("prepare", "text.jsonl", "--out", "new", "--tokenizer", "bytes")
    before = listing(copy)
    with monkeypatch.context() as patch:
        patch.setattr(console, "prepare_line", lambda: press)
        stopped(tdlm(*command))
    assert listing(copy) == before and not (copy / "new").exists()
    assert tdlm(*command).code == 0


def test_tree(copy: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    before = listing(copy)
    monkeypatch.setattr("tdlm.tree.build._split_level", press)
    stopped(tdlm("tree", "build", "--data", "data", "--out", "new", "--branching", "20"))
    assert listing(copy) == before


def test_train(copy: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    """The first Ctrl-C comes at the worst moment: behind the decision whether to save this step. The next step is saved."""
    command = ("train", "demo", "--data", "data", "--tree", "tree", "--out", "new", *SMALL)
    after_step = Sitting.after_step
    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "after_step",
                      lambda self, leaving: (after_step(self, leaving), self.trainer.done == 1 and press()))
        done = tdlm(*command)
    stopped(done)
    assert "everything is saved, continue with: " in done.err
    again = tdlm(*command)
    assert again.code == 0 and "continuing new at step 2/3" in again.err


def test_study(copy: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    """In the first run of two: the same command finishes it, makes the second, and compares them."""
    command = ("study", "rivals", "--out", "new", "--data", "data", "--only", "mdlm", "--only", "gidd", "--device", "cpu",
               "--set", "train.steps=3", "--set", "train.batch=4", "--set", "data.length=16", "--set", "backbone.blocks=1")
    after_step = Sitting.after_step
    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "after_step",
                      lambda self, leaving: (after_step(self, leaving), self.trainer.done == 1 and press()))
        stopped(tdlm(*command))
    assert not (copy / "new" / "compare.html").exists()
    again = tdlm(*command)
    assert again.code == 0 and "at step 2/3" in again.err and (copy / "new" / "compare.html").is_file()
    before = listing(copy / "new" / "runs")
    assert tdlm(*command).code == 0 and listing(copy / "new" / "runs") == before, "the third time there is nothing left to do"


@pytest.mark.parametrize("command", [("sample", "run", "--count", "4000", "--length", "64"),
                                     ("eval", "run", "--repeats", "5000")], ids=["sample", "eval"])
def test_verbs_that_only_read(copy: Path, tdlm: Tdlm, command: tuple[str, ...]):
    before = listing(copy)
    timer = threading.Timer(0.5, press)
    timer.start()
    try:
        done = tdlm(*command)
    finally:
        timer.cancel()
    stopped(done)
    assert listing(copy) == before
