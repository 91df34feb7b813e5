"""`--json`: exactly one JSON document on stdout, whatever the verb; nothing of it on stderr."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tdlm.config import BackboneConfig
from tests.cli.conftest import SMALL, Tdlm
from tests.evaluate.toy_judge import toy_judge
from tests.rivals import write_gidd

TINY = ("--device", "cpu", "--set", "train.steps=2", "--set", "train.batch=4", "--set", "data.length=16",
        "--set", "backbone.blocks=1")

VERBS = {
    "prepare": ("prepare", "text.jsonl", "--out", "new", "--tokenizer", "bytes"),
    "build": ("tree", "build", "--data", "data", "--out", "new", "--branching", "20"),
    "show": ("tree", "show", "run"),
    "train": ("train", "demo", "--data", "data", "--tree", "tree", "--out", "new", *SMALL),
    "plan": ("train", "demo", "--dry-run"),
    "eval": ("eval", "run"), "sample": ("sample", "run", "--count", "2", "--trace"), "report": ("report", "run"),
    "sets": ("eval", "run", "--on", "lambada=text.jsonl", "--on", "ag_news=text.jsonl"),
    "protocol": ("eval", "run", "--protocol", "gidd-512-nopack", "--length", "16"),
    "model": ("eval", "hf:toy", "--data", "data", "--length", "16", "--out", "new/eval.json"),
    "quality": ("quality", "run", "--count", "2", "--steps", "4", "--judge", "toy"),
    "import": ("import", "gidd:them.safetensors", "--out", "new", "--tokenizer", "bytes", "--heads", "2", "--p-uniform", "0.1"),
    "export": ("export", "run", "--out", "new"),
    "compare": ("compare", "run", "--out", "new"), "report compare": ("report", "compare", "run", "run", "--out", "new"),
    "studies": ("study", "--list"), "runs": ("study", "rivals", "--list"),
    "study": ("study", "rivals", "--out", "new", "--data", "data", "--only", "mdlm", *TINY),
}
KEYS = {"prepare": "documents", "build": "levels", "show": "levels", "train": "checkpoint", "plan": "parameters", "eval": "bound",
        "sample": "samples", "report": "report", "sets": "sets", "protocol": "bound", "model": "bound", "quality": "human",
        "import": "family", "export": "model", "compare": "groups", "report compare": "groups", "studies": "studies",
        "runs": "studies", "study": "scores"}


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that needs no package."""
    for place in ("tdlm.verbs.quality", "tdlm.verbs.evaluate"):
        monkeypatch.setattr(f"{place}.load_judge", lambda spec, **options: toy_judge())


def strict(text: str) -> Any:
    """One document and nothing else; NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    value, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    assert text[end:] == "\n", f"behind the document: {text[end:][:80]!r}"
    return value


@pytest.mark.parametrize("name", VERBS)
def test_one_document(copy: Path, tdlm: Tdlm, name: str):
    if name == "import":
        write_gidd(copy / "them.safetensors", BackboneConfig(blocks=1, width=16, heads=2, condition_width=8), 258)
    plain = tdlm(*VERBS[name])
    assert plain.code == 0, plain.err
    if (copy / "new").exists():
        (copy / "new").rename(copy / "first")
    done = tdlm(*VERBS[name], "--json")
    assert done.code == 0, done.err
    value = strict(done.out)
    assert isinstance(value, dict) and value and "{" not in done.err
    assert KEYS[name] in value
    with pytest.raises(ValueError):
        json.loads(plain.out)


def test_a_perplexity_that_no_number_holds(copy: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    """A judge that is wrong beyond measure: null in JSON, on stdout and in files, and pages are made of it all the same."""
    judge = toy_judge()
    judge.model.table *= 1e4
    for place in ("tdlm.verbs.quality", "tdlm.verbs.evaluate"):
        monkeypatch.setattr(f"{place}.load_judge", lambda spec, **options: judge)
    for line, key in ((VERBS["model"], "perplexity"), (VERBS["quality"], "samples")):
        assert "inf" in tdlm(*line).out
        value = strict(tdlm(*line, "--json").out)
        assert (value[key] if key == "perplexity" else value[key]["perplexity"]) is None and json.dumps(value, allow_nan=False)
    assert strict((copy / "new" / "eval.json").read_text())["perplexity"] is None
    assert strict((copy / "run" / "quality.json").read_text())["samples"]["perplexity_per_text"] is None
    assert tdlm("eval", "run").code == 0
    (copy / "run" / "eval.json").write_text(json.dumps({**strict((copy / "run" / "eval.json").read_text()),
                                                        **json.loads('{"bound": 800.5, "perplexity": null}')}))
    for line in (("report", "run"), ("compare", "run", "run", "--out", "side by side")):
        done = tdlm(*line)
        assert done.code == 0, done.err
    strict((copy / "side by side" / "compare.json").read_text())
    assert "800.5" in (copy / "run" / "report.html").read_text() and "800.5" in (copy / "side by side" / "compare.md").read_text()


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
