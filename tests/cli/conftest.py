"""A small world on disk - text, prepared folders, trees, a trained run - and the command line to be used on it."""
from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tdlm.cli import main

SMALL = ("--steps", "3", "--batch", "4", "--set", "data.length=16", "--set", "backbone.width=16", "--set", "backbone.heads=2",
         "--set", "backbone.blocks=1", "--device", "cpu")
"""What makes the demo recipe a run of a second."""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Tdlm = Callable[..., Done]


@pytest.fixture
def tdlm(capsys: pytest.CaptureFixture[str]) -> Tdlm:
    """The command line in this process: `tdlm("eval", "run").code`."""

    def use(*arguments: str | Path) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        seen = capsys.readouterr()
        return Done(int(leaving.value.code or 0), seen.out, seen.err)

    return use


def refused(done: Done, *says: str) -> None:
    """One clear line on stderr, nothing on stdout, exit code 2."""
    lines = done.err.splitlines()
    assert done.code == 2 and done.out == "", done
    assert len(lines) == 1 and lines[0].startswith("tdlm: ") and len(lines[0]) > 25, done.err
    for text in says:
        assert text in lines[0], done.err


def listing(folder: Path) -> dict[str, int]:
    """What is in a folder, hidden files too, with sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["tree", "leaf", "root", "naïve", "branch", "Übung", "seed", "日本"]
    return [" ".join(draw.choices(words, k=12)) for _ in range(count)]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data, tree and run of one tokenizer (bytes), other and other.tree of another; a name with spaces."""
    world = tmp_path_factory.mktemp("a world")
    lines = [json.dumps({"text": text}) for text in texts(40, 0)]
    (world / "text.jsonl").write_text("\n".join(lines) + "\n")
    (world / "file").touch()
    (world / "folder").mkdir()
    commands = [
        ("prepare", world / "text.jsonl", "--out", world / "data", "--tokenizer", "bytes", "--valid", "1"),
        ("prepare", world / "text.jsonl", "--out", world / "other", "--tokenizer", "bpe:262", "--valid", "5"),
        ("tree", "build", "--data", world / "data", "--out", world / "tree", "--branching", "17", "--method", "random"),
        ("tree", "build", "--data", world / "other", "--out", world / "other.tree", "--branching", "17", "--method", "random"),
        ("train", "demo", "--data", world / "data", "--tree", world / "tree", "--out", world / "run", *SMALL)]
    for command in commands:
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in command])
        assert not leaving.value.code, command
    return world


@pytest.fixture
def world(original: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The world as the working folder. For commands that change nothing."""
    monkeypatch.chdir(original)
    return original


@pytest.fixture
def copy(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world of one's own."""
    shutil.copytree(original, tmp_path / "my own world")
    monkeypatch.chdir(tmp_path / "my own world")
    return tmp_path / "my own world"
