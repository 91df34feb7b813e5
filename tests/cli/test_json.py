"""`--json`: exactly one JSON document on stdout, whatever the verb; nothing of it on stderr."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SMALL, Tdlm

VERBS = {
    "prepare": ("prepare", "text.jsonl", "--out", "new", "--tokenizer", "bytes"),
    "build": ("tree", "build", "--data", "data", "--out", "new", "--branching", "20"),
    "show": ("tree", "show", "run"),
    "train": ("train", "demo", "--data", "data", "--tree", "tree", "--out", "new", *SMALL),
    "plan": ("train", "demo", "--dry-run"),
    "eval": ("eval", "run"), "sample": ("sample", "run", "--count", "2", "--trace"), "report": ("report", "run"),
}


def strict(text: str) -> Any:
    """One document and nothing else; NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    value, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    assert text[end:] == "\n", f"behind the document: {text[end:][:80]!r}"
    return value


@pytest.mark.parametrize("name", VERBS)
def test_one_document(copy: Path, tdlm: Tdlm, name: str):
    plain = tdlm(*VERBS[name])
    assert plain.code == 0, plain.err
    if (copy / "new").exists():
        (copy / "new").rename(copy / "first")
    done = tdlm(*VERBS[name], "--json")
    assert done.code == 0, done.err
    value = strict(done.out)
    assert isinstance(value, dict) and value and "{" not in done.err
    expected = {"prepare": "documents", "build": "levels", "show": "levels", "train": "checkpoint", "plan": "parameters",
                "eval": "bound", "sample": "samples", "report": "report"}
    assert expected[name] in value
    with pytest.raises(ValueError):
        json.loads(plain.out)


@pytest.mark.slow
def test_the_demo_twice(tmp_path: Path, tdlm: Tdlm):
    """The second time it continues where it was: nothing is trained again and the same comes out."""
    demo = ("demo", "--minutes", "0.05", "--out", tmp_path / "my demo")
    first = tdlm(*demo)
    assert first.code == 0 and "validation bound" in first.out and "filled gaps" in first.out
    again = tdlm(*demo, "--json")
    value = strict(again.out)
    assert again.code == 0 and "is complete" in again.err and f"{value['bound']:.3f} nats/token" in first.out
    assert Path(value["report"]).stat().st_size > 100_000
    other = tdlm("demo", "--minutes", "0.1", "--out", tmp_path / "my demo")
    assert other.code == 2 and "holds a demo of 0.05min; choose another folder" in other.err.splitlines()[-1]
