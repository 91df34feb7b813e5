"""Many runs side by side: sorted and marked by their errors, never mixed across protocols, in every form they are written."""
from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tdlm.errors import RunError
from tdlm.report import compare_runs
from tdlm.report.protocol import in_words, protocol
from tdlm.report.ranking import rank
from tdlm.report.read import read_run
from tdlm.report.tables import shared, shown
from tests.report.test_html import EVIL, Page

QUALITY = {"judge": {"name": "gpt2-large", "dtype": "float32"}, "max_length": 512, "settings": {"steps": 64, "evaluations": 61.5},
           "samples": {"count": 256, "perplexity": 148.04, "entropy": 5.42, "distinct": {"1": 0.1, "2": 0.62, "3": 0.9}},
           "human": {"count": 256, "perplexity": 25.1, "entropy": 5.61, "distinct": {"1": 0.12, "2": 0.7, "3": 0.95}}}


def change(run: Path, name: str, **values: Any) -> Path:
    """Set values of a JSON file, also nested ones: `config__method__kind=...`."""
    path = run / name
    held = json.loads(path.read_text()) if path.exists() else {}
    for key, value in values.items():
        *way, last = key.split("__")
        place = held
        for part in way:
            place = place.setdefault(part, {})
        place[last] = value
    path.write_text(json.dumps(held))
    return run


@pytest.fixture(scope="module")
def runs(make_run, tmp_path_factory) -> list[Path]:
    """A tree, one that is too near to tell from it, masked diffusion, and a left-to-right model; measured alike."""
    folder = tmp_path_factory.mktemp("many")
    tree = make_run(folder / "tree", steps=40, bound=5.40)
    change(tree, "quality.json", **QUALITY)
    near = change(make_run(folder / "near", steps=40, bound=5.42, seed=2), "eval.json", estimator="sampled")
    change(near, "config.json", config__method__process={"kind": "overlapping"})
    change(near, "config.json", provenance__warm_start={"from": "gidd-small"})
    flat = change(make_run(folder / "mdlm", steps=40, bound=5.61, seed=3, height=1), "config.json",
                  config__method={"kind": "mdlm", "head": {"kind": "shared"}})
    change(flat, "quality.json", **{**QUALITY, "samples": {**QUALITY["samples"], "perplexity": 170.1}})
    left = change(make_run(folder / "ar", steps=40, bound=5.9, seed=4, height=1), "eval.json", estimator="exact", error=0.0)
    change(left, "config.json", config__method={"kind": "ar", "head": {"kind": "shared"}})
    return [flat, near, left, tree]


@pytest.fixture(scope="module")
def written(runs: list[Path], tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    compare_runs(runs, folder)
    return folder


def ranked(*paths: Path) -> list[Any]:
    return rank([read_run(path) for path in paths])


def test_sorted_by_bound_and_marked_by_error(runs: list[Path]) -> None:
    section, = ranked(*runs)
    marks = [(entry.name, entry["mark"]) for entry in section.entries]
    assert marks == [("tree", "best"), ("near", "near"), ("mdlm", ""), ("ar", "")]
    assert [entry.place for entry in section.entries] == [3, 1, 0, 2]
    assert 5.42 - 5.40 < 2 * math.hypot(0.0112, 0.0112) < 5.61 - 5.40
    assert [entry["kind"] for entry in section.entries] == ["bound", "bound", "bound", "exact"]


def test_what_some_runs_do_not_say_is_not_the_same_throughout(make_run, tmp_path: Path) -> None:
    """One of two numbers does not say how it was estimated: a column, with a dash. A run that was not judged needs no judge."""
    paths = [change(make_run(tmp_path / name, steps=40, bound=5.4), "eval.json", estimator="count") for name in ("one", "two")]
    change(paths[0], "quality.json", **QUALITY)
    sections = ranked(*paths)
    assert "estimator: count" in shared(sections) and "judge: gpt2-large" in shared(sections)
    assert not {"estimator", "judge", "device"} & {name for name, _ in shown(sections)}
    change(paths[1], "eval.json", estimator=None)
    change(paths[1], "config.json", provenance__device=None)
    sections = ranked(*paths)
    assert "estimator" not in shared(sections) and "device" not in shared(sections) and "judge: gpt2" in shared(sections)
    cells = {name: [text(entry.facts) for section in sections for entry in section.entries] for name, text in shown(sections)}
    assert sorted(cells["estimator"]) == ["count", "\N{EN DASH}"] and "\N{EN DASH}" in cells["device"]


def test_what_is_no_bound_is_not_best_where_there_are_bounds(runs: list[Path], make_run, tmp_path: Path) -> None:
    low = change(make_run(tmp_path / "low", steps=40, bound=4.0), "eval.json", is_a_bound=False)
    section, = ranked(*runs, low)
    assert section.entries[0].name == "low" and section.entries[0]["mark"] == "" and section.entries[1]["mark"] == "best"
    only, = ranked(make_run(tmp_path / "a", steps=40, pad="drop"), make_run(tmp_path / "b", steps=40, pad="drop", bound=5.0))
    assert [entry["mark"] for entry in only.entries] == ["best", ""]  # all of one kind, which the notes name
    assert any("not bounds" in note for note in only.notes)


def test_the_estimator_does_not_part_runs_but_the_protocol_does(runs: list[Path], make_run, tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", steps=40)
    for number, (name, values) in enumerate([
            ("PAD mode", {"pad": "given-length"}), ("row length", {"length": 512}), ("row layout", {"layout": "packed"}),
            ("average", {"protocol": {"average": "batches", "batch": 64}}), ("text", {"split": "train"}),
            ("text", {"set": {"name": "ptb"}}),
            ("data", {"provenance__data_fingerprint": "other"}), ("tokenizer", {"provenance__tokenizer_hash": "other"}),
            ("tokens scored", {"tokens": 7})]):
        other = change(make_run(tmp_path / f"other{number}", steps=40), "eval.json", **values)
        sections = ranked(base, other)
        assert len(sections) == 2, name
        line, = in_words([section.protocol for section in sections])
        assert line.startswith(f"{name} (group 1: ") and line.endswith(".")
    trained = make_run(tmp_path / "trained", steps=40, only={"config.json", "metrics.jsonl"})
    assert "no: validation" in protocol(read_run(trained))["evaluated"] and len(ranked(base, trained)) == 2
    named = change(make_run(tmp_path / "named", steps=40), "eval.json",
                   protocol={"name": "strict", "average": "tokens", "layout": "document", "length": 128, "estimator": "sampled"})
    assert len(ranked(base, named)) == 1


def test_groups_with_one_value_are_named_together() -> None:
    lines = in_words([{"row length": "128"}, {"row length": "512"}, {"row length": "128"}])
    assert lines == ["row length (groups 1 and 3: 128; group 2: 512): in a longer row a token has more context."]


def test_what_was_not_evaluated_differs_in_that_alone():
    """A PAD mode and a number of tokens that nobody recorded are no differences of their own."""
    done = {"evaluated": "with tdlm eval", "PAD mode": "pack", "row length": "16", "tokens scored": "32"}
    line, = in_words([done, {**done, "evaluated": "no: validation during training only", "PAD mode": "not recorded",
                             "tokens scored": "not recorded"}])
    assert line.startswith("evaluated (group 1: with tdlm eval; group 2: no")
    assert len(in_words([done, {**done, "PAD mode": "not recorded"}])) == 1


def test_counting_models_are_references_where_the_runs_agree(runs: list[Path], make_run, tmp_path: Path) -> None:
    section, = ranked(*runs)
    assert [model["name"] for model in section.references] == ["unigram", "bigram", "trigram"]
    model = section.references[1]
    assert model["bound"] == 5.351 and model["perplexity"] == pytest.approx(math.exp(5.351))
    assert model["bits_per_byte"] == pytest.approx(5.351 * 20_738 / 88_335 / math.log(2))
    odd = change(make_run(tmp_path / "odd", steps=40), "eval.json", ngrams={"unigram": 6.768, "bigram": 5.0})
    section, = ranked(*runs, odd)
    assert [model["name"] for model in section.references] == ["unigram", "trigram"]
    assert any("do not agree" in note for note in section.notes)


def test_notes_say_what_may_not_be_compared(runs: list[Path], make_run, tmp_path: Path) -> None:
    def notes(*paths: Path) -> str:
        return " ".join(note for section in ranked(*paths) for note in section.notes)

    tree, near, flat, left = runs[3], runs[1], runs[0], runs[2]
    assert "different processes" in notes(tree, near) and "different processes" not in notes(tree)
    assert "-log p itself" in notes(tree, left) and "-log p itself" not in notes(tree, flat)
    assert "repetition" in notes(tree) and "repetition" not in notes(near)
    fast = change(make_run(tmp_path / "fast", steps=40), "config.json", provenance__device="a faster one")
    change(fast, "quality.json", **{**QUALITY, "judge": "another", "settings": {"steps": 64, "temperature": 0.9}})
    text = notes(tree, fast)
    assert "different devices" in text and "(judge, temperature)" in text and "measured differently" not in notes(tree, flat)


def test_everything_is_written(written: Path) -> None:
    out, held = written, json.loads((written / "compare.json").read_text())
    kinds = ("html", "md", "json", "csv", "svg", "png")
    assert {path.name for path in out.iterdir()} == {f"compare.{kind}" for kind in kinds} and held["differences"] == []
    assert [run["name"] for run in held["groups"][0]["runs"]] == ["tree", "near", "mdlm", "ar"]
    first = held["groups"][0]["runs"][0]
    assert first["bound"] == 5.40 and first["generative_perplexity"] == 148.04 and first["distinct_2"] == 0.62
    assert first["evaluations"] == 61.5 and first["judge"] == "gpt2-large" and held["groups"][0]["human"]["entropy"] == 5.61
    assert (first["parameters"], first["parameters_blocks"], first["parameters_head"]) == (1_121_664, 793_600, 16_512)
    assert first["tokens_seen"] == 40 * 4096 and first["memory"] == 812_000_000 and first["tree"] == "K=16, H=2"
    lines = list(csv.DictReader((out / "compare.csv").read_text().splitlines()))
    counting = [f"{name} (counting)" for name in ("unigram", "bigram", "trigram")]
    assert [line["run"] for line in lines] == ["tree", "near", "mdlm", "ar", *counting, "human text"]
    assert float(lines[0]["bits_per_byte"]) == first["bits_per_byte"] and lines[0]["PAD mode"] == "count"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (out / "compare.svg").read_text()
    table = (out / "compare.md").read_text()
    assert "| tree | tree \N{MIDDLE DOT} cascade \N{MIDDLE DOT} shared head" in table and "5.400" in table and "(best)" in table
    assert "begun with gidd-small" in table and "*trigram (counting)*" in table
    widths = {line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_page_is_whole_and_loads_nothing(written: Path) -> None:
    text = (written / "compare.html").read_text(encoding="utf-8")
    page = Page(text)
    ids = page.values("id")
    assert len(ids) == len(set(ids)) and "script" not in page.tags
    assert all(value.startswith("#") and value[1:] in ids for value in page.values("href", "xlink:href") if value)
    assert page.values("src", "srcset", "data") == [] and not re.search(r"@import|https?://", text)
    assert any("default-src 'none'" in value and "script-src 'none'" in value for value in page.values("content"))
    words = re.sub(r"\s+", " ", page.text)
    assert "human text" in words and "25.1" in words
    for expected in ("4 runs side by side", "best", "\N{ALMOST EQUAL TO} best", "5.400", "148.0", "trigram (counting)", "exact",
                     "train.seed: 3 -> 2", "judge: gpt2-large"):
        assert expected in words, expected
    assert "bound, nats/token" in page.values("data-name")  # what a cell is called on a narrow screen
    assert page.tags.count("svg") == 4  # dots and curves, wide and narrow


def test_same_inputs_same_bytes(runs: list[Path], written: Path, tmp_path: Path) -> None:
    again = compare_runs(runs, tmp_path / "again")["files"]
    assert len(again) == 6
    for path in map(Path, again.values()):
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name


def test_protocols_never_share_a_table(runs: list[Path], make_run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", steps=40, bound=4.9, pad="given-length")
    made = compare_runs([runs[3], other], tmp_path / "out")
    assert len(made["groups"]) == 2 and re.search(r"^PAD mode .*bounds -log p\(x \| length\)", made["differences"][0])
    table = (tmp_path / "out" / "compare.md").read_text()
    first, second = table[table.index("## Group 1"):].split("## Group 2")
    assert "4.900" not in first and "4.900" in second and "5.400" not in second
    words = Page((tmp_path / "out" / "compare.html").read_text()).text
    assert "not measured alike" in words and "2 separate tables" in words
    with pytest.raises(RunError, match="not measured alike: PAD mode") as caught:
        compare_runs([*runs, other], tmp_path / "strict", one_protocol=True)
    assert not (tmp_path / "strict").exists() and "\n" not in str(caught.value)
    assert compare_runs(runs[3:], tmp_path / "strict", one_protocol=True)["differences"] == []


def test_another_protocol_or_text_can_be_chosen(runs: list[Path], make_run, tmp_path: Path) -> None:
    folders = []
    for number, bound in enumerate((4.1, 4.0)):
        run = make_run(tmp_path / f"run{number}", steps=40, bound=5.0 + number)
        own = json.loads((run / "eval.json").read_text())
        other = {**own, "bound": bound, "protocol": {"name": "mdlm-1024-pack", "average": "tokens", "layout": "framed"}}
        folders.append(change(run, "eval.json", protocols={"mdlm-1024-pack": other},
                              sets={"ptb": {"strict": {**own, "bound": bound + 1, "set": {"name": "ptb"}}}}))
    assert [e["bound"] for e in compare_runs(folders, tmp_path / "a")["groups"][0]["runs"]] == [5.0, 6.0]
    chosen = compare_runs(folders, tmp_path / "b", protocol="mdlm-1024-pack", one_protocol=True)["groups"][0]
    assert [e["bound"] for e in chosen["runs"]] == [4.0, 4.1] and chosen["protocol"]["row layout"] == "framed"
    chosen = compare_runs(folders, tmp_path / "c", on="ptb")["groups"][0]
    assert [e["bound"] for e in chosen["runs"]] == [5.0, 5.1] and chosen["protocol"]["text"] == "ptb"
    with pytest.raises(RunError, match=r"run0 has no result under protocol strict on lambada; make it: tdlm eval"):
        compare_runs(folders, tmp_path / "d", on="lambada")
    elsewhere = change(make_run(tmp_path / "elsewhere", steps=40, only={"config.json", "metrics.jsonl"}), "eval.json",
                       protocols={"mdlm-1024-pack": {"bound": 4.0}})
    assert "no: validation" in protocol(read_run(elsewhere))["evaluated"]  # of its own there is only the validation


def test_without_matplotlib_bars_stand_in(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = compare_runs(runs, tmp_path / "out")
    assert set(made["files"]) == {"html", "md", "json", "csv"}
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert "svg" not in page.tags and sum(value.startswith("bar ") for value in page.values("class")) == 4 + 3


def test_names_of_runs_are_harmless_and_told_apart(make_run, tmp_path: Path) -> None:
    one = make_run(tmp_path / "a|b" / "<img src=x>$x_1$", steps=40)
    two = make_run(tmp_path / "c" / "<img src=x>$x_1$", steps=40)
    change(one, "quality.json", **{**QUALITY, "judge": EVIL})
    change(two, "config.json", provenance__device=EVIL, config__method__kind=EVIL)
    made = compare_runs([one, two], tmp_path / "out")
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert "img" not in page.tags and "script" not in page.tags and "<img src=x>" in page.text
    assert [run["name"] for run in made["groups"][0]["runs"]] == ["a|b/<img src=x>$x_1$", "c/<img src=x>$x_1$"]
    table = (tmp_path / "out" / "compare.md").read_text()
    assert "<img" not in table.replace("\\<img", "") and "<script" not in table.replace("\\<", "")
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_runs_that_say_little_are_shown_too(make_run, tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", only={"config.json"})
    odd = make_run(tmp_path / "odd", steps=40)
    (odd / "eval.json").write_text('{"bound": NaN, "levels": [null, "x"], "ngrams": 7, "provenance": [], "protocol": 3}')
    (odd / "quality.json").write_text('{"perplexity": "high", "distinct": [1], "judge": null}')
    made = compare_runs([bare, odd], tmp_path / "out")
    assert {entry["bound"] for group in made["groups"] for entry in group["runs"]} >= {None}
    only = compare_runs([bare], tmp_path / "only")
    assert only["groups"][0]["runs"][0]["bound"] is None and "svg" not in only["files"]


def test_what_cannot_be_read_is_one_line(make_run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run to compare"):
        compare_runs([], tmp_path / "out")
    with pytest.raises(RunError, match="no run folder"):
        compare_runs([tmp_path / "nothing"], tmp_path / "out")
    broken = make_run(tmp_path / "broken", steps=40)
    (broken / "tree.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match="damaged"):
        compare_runs([broken], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        compare_runs([make_run(tmp_path / "fine", steps=40)], tmp_path / "file")
