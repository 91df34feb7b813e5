"""Odd places to write to and to be run in: no space left, a path below a file, other processes, ASCII, no terminal."""
from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tdlm.cli import VERBS, main
from tdlm.data import shards
from tdlm.train import folder
from tests.cli.conftest import SMALL, Tdlm, listing, refused

ROOT = Path(__file__).resolve().parents[2]


def alone(*arguments: str | Path, **settings: object) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own, without a terminal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", **settings.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run([sys.executable, "-m", "tdlm", *map(str, arguments)], env=environment, capture_output=True,
                          timeout=200, check=False, **settings)  # type: ignore[call-overload]


WRITES = [("prepare", "text.jsonl", "--tokenizer", "bytes", "--out"),
          ("tree", "build", "--data", "data", "--method", "random", "--out"), ("tree", "show", "tree", "--json", "--svg"),
          ("train", "demo", "--data", "data", "--tree", "tree", *SMALL, "--out"), ("report", "run", "--out"),
          ("export", "run", "--out"),
          ("demo", "--minutes", "0.01", "--out")]


@pytest.mark.parametrize("command", WRITES, ids=[" ".join(command[:2]) for command in WRITES])
@pytest.mark.parametrize("place", ["file/below/far", "/proc/none/below"])
def test_places_that_cannot_be_written(world: Path, tdlm: Tdlm, command: tuple[str, ...], place: str):
    """Permissions do not bind root, a path below a file does; the line names what was asked for."""
    before = listing(world)
    done = tdlm(*command, place)
    lines = [line for line in done.err.splitlines() if line.startswith("tdlm: ")]
    assert done.code == 2 and not done.out and len(lines) == 1 and place.split("below")[0].rstrip("/") in lines[0], done
    assert listing(world) == before


@pytest.mark.parametrize("command, says", zip(WRITES[1:3], ("folder is a folder; a tree is a file", "folder: Is a directory")),
                         ids=["build", "show"])
def test_a_folder_where_a_file_should_go(world: Path, tdlm: Tdlm, command: tuple[str, ...], says: str):
    before = listing(world)
    refused(tdlm(*command, "folder"), says)
    assert listing(world) == before


def test_a_device_is_written_to_and_not_replaced(world: Path, tdlm: Tdlm):
    """The kind of every device is looked at before and after."""
    full = os.stat("/dev/full")
    assert stat.S_ISCHR(full.st_mode)
    refused(tdlm(*WRITES[1], "/dev/full"), "/dev/full: No space left on device")
    assert os.stat("/dev/full").st_rdev == full.st_rdev and stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert tdlm("tree", "show", "tree", "--json", "--svg", "/dev/null").code == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_symbolic_link_stays_one(copy: Path, tdlm: Tdlm):
    (copy / "link").symlink_to("real.svg")
    assert tdlm("tree", "show", "tree", "--svg", "link").code == 0
    assert (copy / "link").is_symlink() and (copy / "real.svg").read_text().startswith("<svg")


def test_two_writers(copy: Path, tdlm: Tdlm):
    with folder.hold(copy / "run"):
        refused(tdlm("train", "demo", "--data", "data", "--tree", "tree", "--out", "run", *SMALL),
                "the run run is being written by another process; wait for it or choose another folder")
    (copy / "new.partial").mkdir()
    with shards.locked(copy / "new.partial"):
        done = tdlm("prepare", "text.jsonl", "--out", "new", "--tokenizer", "bytes")
        refused(done, "new", "another")
    assert tdlm("prepare", "text.jsonl", "--out", "new", "--tokenizer", "bytes").code == 0


def test_from_text_to_page_with_spaces_in_every_name(original: Path, tmp_path: Path, tdlm: Tdlm):
    place = tmp_path / "my runs & 'things'"
    text = tmp_path / "my text.jsonl"
    text.write_bytes((original / "text.jsonl").read_bytes())
    for command in (("prepare", text, "--out", place / "a b", "--tokenizer", "bytes", "--valid", "5"),
                    ("tree", "build", "--data", place / "a b", "--out", place / "c d", "--branching", "20"),
                    ("train", "demo", "--data", place / "a b", "--tree", place / "c d", "--out", place / "e f", *SMALL),
                    ("eval", place / "e f"), ("sample", place / "e f", "--count", "1", "--trace"), ("report", place / "e f"),
                    ("tree", "show", place / "e f", "--svg", place / "g h" / "tree.svg")):
        assert tdlm(*command).code == 0, command
    assert (place / "e f" / "report.html").stat().st_size > 10_000 and (place / "g h" / "tree.svg").is_file()


def test_an_ascii_locale(copy: Path):
    """Text that ASCII cannot say is shown as ?, a mistake keeps to one line, and JSON loses nothing."""
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = alone("sample", "run", "--count", "1", "--prompt", "日本", cwd=copy, env=ascii_only)
    assert done.returncode == 0 and b"??" in done.stdout and b"Traceback" not in done.stderr
    done = alone("sample", "run", "--count", "1", "--prompt", "日本", "--json", cwd=copy, env=ascii_only)
    assert json.loads(done.stdout.decode("ascii"))["samples"][0]["text"].startswith("日本")
    done = alone("eval", "run", "--repeat", "3", cwd=copy, env=ascii_only)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1) and b"did you mean --repeats?" in done.stderr


@pytest.mark.parametrize("command", [("tree", "show", "tree", "--data", "data"), ("sample", "run", "--count", "1"), ("--help",)],
                         ids=lambda command: command[0])
def test_a_reader_that_leaves_early(copy: Path, command: tuple[str, ...]):
    """`tdlm ... | head -1`, or with the reader gone before the first line: no traceback, no complaint of the interpreter."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "tdlm", *command], cwd=copy, stdout=write, stderr=subprocess.PIPE,
                              timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"})
    finally:
        os.close(write)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr and b"Broken pipe" not in done.stderr


def test_a_hub_that_cannot_be_reached(copy: Path):
    """One line, and soon."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    started = time.monotonic()
    for command in (("tree", "build", "--data", "data", "--out", "new", "--vectors", "hf:owner/model"),
                    ("prepare", "hf:owner/name", "--out", "new")):
        done = alone(*command, cwd=copy, env=nowhere)
        lines = done.stderr.decode().splitlines()
        assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("tdlm: "), lines
        assert "owner/" in lines[0] or "pip install" in lines[0]
    assert time.monotonic() - started < 60
    assert not (copy / "new").exists() and not (copy / "new.partial").exists()


def test_help_answers_without_torch():
    program = ("import sys, tdlm.cli\n"
               "try: tdlm.cli.main(['train', '--help'])\n"
               "except SystemExit: pass\n"
               "sys.exit(3 if 'torch' in sys.modules or 'numpy' in sys.modules else 0)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0 and b"--dry-run" in done.stdout


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS), ("tree", "build"), ("tree", "show")], ids=" ".join)
def test_every_help_page(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main([*verb, "--help"])
    seen = capsys.readouterr()
    assert leaving.value.code == 0 and not seen.err and " ".join(("tdlm", *verb)) in seen.out
