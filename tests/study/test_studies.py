"""Every study from its data to its tables, tiny; what is stopped goes on, what fails stops no other, minutes become steps."""
from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdlm.cli import main
from tdlm.config import RunConfig, TrainConfig
from tdlm.data.batches import TrainRows, eval_rows
from tdlm.data.store import TokenStore
from tdlm.errors import ConfigError, RunError
from tdlm.evaluate.judge import token_nats
from tdlm.rng import Draws
from tdlm.study import SIZES, STUDIES, Wishes, conduct, study
from tdlm.study.collect import cost, row_of
from tdlm.study.engine import tree_name
from tdlm.study.entry import Entry
from tdlm.study.pack import pack
from tdlm.study.predict import predict
from tdlm.study.reading import run_judge
from tdlm.study.texts import _fence
from tdlm.study.trace import moments
from tdlm.train.metrics import Quiet
from tdlm.train.pace import Pace, in_minutes
from tdlm.train.run import open_run
from tdlm.tree.tree import Tree
from tests.study.conftest import SMALL, TINY

OWN = {  # files and words that only this study makes
    "equal-cost": (("equal-cost-cost.svg",), ("tuning, minutes", "| V |", "| 64 |")),
    "small-base": (("texts/ar-base-16-steps.json",), ("## Generated text", "human text", "Judge run ar-base")),
    "branching": (("branching-stacked.svg", "branching-raw.svg"), ("| clustering |", "hdlm-4", "kmeans-64", "level 0 (leaf)")),
    "size-ratio": (("size-ratio-cost.svg",), ("min ratio", "0.5")),
    "bounds-per-level": (("bounds-per-level-stacked.svg",), ("level 8", "kmeans-2")),
    "level-weights": (("level-weights-raw.svg",), ("exponential-0.3", "linear-0.5", "gamma")),
    "weight-schedules": (("weight-schedules.svg",), ("exponential 0.3", "| 15 |")),
    "joint": ((), ("K2-L8", "K4-L2")),
    "trees": ((), ("corpus-exchange", "random", "frequency", "vectors-mine")),
    "step-allocation": (("texts/tdlm-4-28.json", "texts/tdlm-28-4.json"), ("| 16 / 16 |", "entropy, nats", "human text")),
    "sample-sheets": (("texts/tdlm-64-steps.json",), ("## tdlm, 32 steps", "Sample 1:", "None was left out")),
    "picture": (("picture-tdlm-tree.svg", "picture-tdlm-trace.svg"), ("from coarse to fine",))}


def go(name: str, out: Path, data: Path | None, **more: Any) -> dict[str, Any]:
    options = {"wishes": TINY, "say": lambda line: None, **more}
    return conduct(study(name), out, data=data, device="cpu", command="test", progress=Quiet, **options)


@pytest.mark.parametrize("name", OWN)
def test_every_study_from_data_to_tables(name: str, text: Path, tmp_path: Path) -> None:
    wishes = TINY
    if name == "trees":
        np.save(tmp_path / "mine.npy", np.random.default_rng(0).normal(size=(258, 4)))
        wishes = Wishes(settings=SMALL, vectors=(str(tmp_path / "mine.npy"),))
    result = go(name, tmp_path / "out", text, wishes=wishes)
    assert not result["failed"] and not result["missing"]
    page = Path(result["table"]).read_text(encoding="utf-8")
    files, words = OWN[name]
    assert all((tmp_path / "out" / file).is_file() for file in files)
    assert all(word in page for word in words), page
    finals = [entry for entry in study(name).runs("toy", wishes) if entry.trial_of is None]
    assert [entry.name for entry in finals] == list(result["runs"])
    for entry in finals:
        row = next(line for line in page.splitlines() if line.startswith(f"| {entry.name} |"))
        assert row.count("|") == page.splitlines()[4].count("|"), "every row has every column"
        score = result["scores"][entry.name]
        assert f"{score['perplexity']:,.2f}" in row and f"{result['runs'][entry.name]['epochs']:.2f}" in row
    assert bool(finals) == ("html" in result["files"])
    assert json.loads((tmp_path / "out" / "study.json").read_text())["runs"].keys() == result["runs"].keys()
    if name == "equal-cost":
        check_rates(result, tmp_path / "out")


def check_rates(result: dict[str, Any], out: Path) -> None:
    """Every method has three trials, which leave no weights; the final run has the best one's rate; what differs from a method in
    K, in its weights or in its tree takes that one's."""
    trials, rate_of = result["trials"], {entry.name: entry.rate_of for entry in study("equal-cost").entries("toy")}
    assert len(trials) == 42 and all(found["minutes"] > 0 for found in trials.values())
    assert not [name for name in trials if (out / "runs" / name / "checkpoints").exists()]
    assert rate_of["cascade-tied-64"] == "cascade-tied-32" and rate_of["overlapping-tied-32-exchange"] == "overlapping-tied-32"
    for name, run in result["runs"].items():
        own = [found for found in trials.values() if found["of"] == name]
        of = own or [found for found in trials.values() if found["of"] == rate_of[name]]
        assert len(of) == 3 and bool(own) == (rate_of[name] is None)
        assert run["lr"] == min(of, key=lambda found: found["bound"])["lr"]
        assert run["tuning_minutes"] == pytest.approx(sum(found["minutes"] for found in own))
    assert not any((out / "paces").glob("*")), "steps that were set by hand are not measured"


def test_runs_of_a_study_see_the_same_rows_in_the_same_order() -> None:
    for one in STUDIES.values():
        for size in SIZES:
            entries = [entry for entry in one.runs(size) if entry.config.method.kind != "ar" or one.name != "step-allocation"]
            rows = {(entry.config.train.seed, entry.config.train.batch, entry.config.data) for entry in entries}
            assert len(rows) <= 1, (one.name, size)
            lengths = {(entry.minutes, None if entry.minutes else entry.config.train.steps) for entry in entries
                       if entry.trial_of is None}
            assert len(lengths) <= 1 or (one.name, size) == ("rivals", "toy"), (one.name, size)
            assert all((entry.tree is None) == entry.config.method.flat for entry in entries)


def test_the_full_size_is_the_papers() -> None:
    full = {entry.name: entry for entry in study("branching").runs("full")}
    assert {entry.tree["branching"] for entry in full.values() if entry.tree} == {2, 4, 64, 128, 256, 512, 1024}
    assert {entry.tree["method"] for entry in full.values() if entry.tree} == {"hdlm", "kmeans"}
    assert all(entry.config.train.batch == 128 and entry.config.backbone.blocks == 17 for entry in full.values())
    systems = {entry.name: entry.config for entry in study("small-base").runs("full")}
    assert {"tdlm-small", "mdlm-small", "gidd-small", "hdlm-small", "tdlm-base", "hdlm-base"} <= systems.keys()
    assert systems["tdlm-base"].backbone.blocks == 27 and systems["hdlm-base"].backbone.blocks == 24
    joint = {(entry.facts["K"], entry.facts["L"]) for entry in study("joint").runs("full")}
    assert joint == {(2, 1), (4, 1), (2, 4), (2, 8), (2, 16), (4, 8)}


def test_a_stopped_study_goes_on(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tdlm.study import engine

    real, made = engine.train, []

    def train(config: RunConfig, **options: Any) -> Any:
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(config.name)
        return real(config, **options)

    monkeypatch.setattr(engine, "train", train)
    with pytest.raises(KeyboardInterrupt):
        go("level-weights", tmp_path, text, only=["none", "linear-1"])
    assert (tmp_path / "runs" / "none" / "eval.json").is_file() and not (tmp_path / "study.json").exists()
    monkeypatch.setattr(engine, "train", real)
    built: list[Any] = []
    monkeypatch.setattr(engine, "build_from", lambda **options: built.append(options))
    before = (tmp_path / "runs" / "none" / "metrics.jsonl").read_bytes()
    result = go("level-weights", tmp_path, text, only=["none", "linear-1"])
    assert list(result["runs"]) == ["none", "linear-1"] and not built
    assert (tmp_path / "runs" / "none" / "metrics.jsonl").read_bytes() == before
    assert "exponential-0.3" in result["missing"] and not result["outcome"], "the study's own part waits for all runs"
    assert len(list((tmp_path / "trees").iterdir())) == 1, "one tree for all that ask for the same"


def test_a_run_that_fails_stops_no_other(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    from tdlm.study import engine

    real = engine.train

    def train(config: RunConfig, **options: Any) -> Any:
        if config.name.endswith("linear-1"):
            raise RuntimeError("the device fell asleep")
        return real(config, **options)

    command = ["study", "level-weights", "--out", str(tmp_path), "--data", str(text), "--device", "cpu",
               "--pack", str(tmp_path / "all.tar.gz"),
               *(word for name in ("none", "linear-1", "linear-3") for word in ("--only", name)),
               *(word for item in SMALL for word in ("--set", item))]
    monkeypatch.setattr(engine, "train", train)
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--json"])
    seen = capsys.readouterr()
    assert leaving.value.code == 2 and "linear-1 failed: the device fell asleep" in seen.err
    assert "failed: linear-1; the others are done" in seen.err.splitlines()[-1]
    told = json.loads(seen.out)
    assert list(told["runs"]) == ["none", "linear-3"] and list(told["failed"]) == ["linear-1"], "what is done is told"
    kept = json.loads((tmp_path / "study.json").read_text())
    assert list(kept["runs"]) == ["none", "linear-3"] and kept["failed"] == {"linear-1": "RuntimeError: the device fell asleep"}
    assert "fell asleep" in (tmp_path / "failed" / "linear-1.txt").read_text()
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert {"runs/none/eval.json", "failed/linear-1.txt", "study.json"} <= set(archive.getnames())
    monkeypatch.setattr(engine, "train", real)
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--json"])
    assert leaving.value.code == 0 and list(json.loads(capsys.readouterr().out)["runs"]) == ["none", "linear-1", "linear-3"]
    assert not list((tmp_path / "failed").iterdir())


def test_minutes_become_steps_that_end_when_they_should(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tuple(item for item in SMALL if not item.startswith("train.steps"))
    wishes = Wishes(minutes=0.1, settings=settings)  # a trial has a quarter of it: 1.5 seconds
    result = go("equal-cost", tmp_path, text, wishes=wishes, only=["mdlm@0.002"])
    config = json.loads((tmp_path / "runs" / "mdlm@0.002" / "config.json").read_text())["config"]
    pace = json.loads(next((tmp_path / "paces").glob("*.json")).read_text())["pace"]
    assert config["train"]["steps"] == round(1.5 / pace["seconds"]) and config["name"].endswith("0.025min")
    assert config["train"]["warmup"] == round(config["train"]["steps"] * 20 / 400), "the warm-up keeps its share"
    assert 0.3 < 60 * result["trials"]["mdlm@0.002"]["minutes"] < 6, "1.5 seconds, on a machine that others use too"

    monkeypatch.setattr("tdlm.study.engine.measured", lambda *a: pytest.fail("measured again"))
    go("equal-cost", tmp_path, text, wishes=wishes, only=["mdlm@0.002", "mdlm@0.004"])
    other = json.loads((tmp_path / "runs" / "mdlm@0.004" / "config.json").read_text())["config"]
    assert other["train"]["steps"] == config["train"]["steps"] and other["train"]["lr"] == 0.004
    result = go("equal-cost", tmp_path, text, wishes=wishes, only=["mdlm"])
    assert "make them first: --only mdlm@0.008" in result["failed"]["mdlm"]


def test_in_minutes_by_hand() -> None:
    settings = TrainConfig(steps=1000, warmup=50, valid_every=100, save_every=500)
    fitted = in_minutes(settings, 2.0, 0.03)
    assert (fitted.steps, fitted.warmup, fitted.valid_every, fitted.save_every) == (4000, 200, 400, 2000)
    assert in_minutes(settings, 1e-9, 1.0).steps == 1
    assert in_minutes(settings, 19.7 / 6, 1.0).valid_every == 20, "no validation just before the last one"
    before = torch.get_num_threads()
    with Pace(0.5, 1).kept() as seconds:
        assert seconds == 0.5 and torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_finished_runs_are_studied_where_they_lie(text: Path, tmp_path: Path) -> None:
    go("level-weights", tmp_path / "first", text, only=["none"])
    run = tmp_path / "first" / "runs" / "none"
    result = go("bounds-per-level", tmp_path / "out", None, finished=[run])
    assert list(result["runs"]) == ["none"] and len(result["outcome"]["levels"]["none"]) == 10
    assert not (tmp_path / "out" / "runs").exists()
    failed = go("step-allocation", tmp_path / "steps", None, finished=[run], wishes=Wishes(judge=str(run)))
    assert "needs a run on a tree of height 2" in failed["failed"]["outcome"]
    with pytest.raises(ConfigError, match="leave out --only"):
        go("bounds-per-level", tmp_path / "out", None, finished=[run], only=["kmeans-2"])
    with pytest.raises(RunError, match="no run"):
        go("picture", tmp_path / "no", None, finished=[tmp_path / "gone"])


def test_what_a_run_cost_by_hand(text: Path, tmp_path: Path) -> None:
    go("rivals", tmp_path, text, only=["mdlm-tied"], wishes=Wishes(settings=("train.steps=400", *SMALL[1:])))
    folder = tmp_path / "runs" / "mdlm-tied"
    config = RunConfig.from_json(json.loads((folder / "config.json").read_text())["config"])
    found = cost(row_of(Entry("mdlm-tied", config), folder))
    rows = TrainRows(TokenStore(text), length=16, layout="packed", batch=4, seed=1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert found["epochs"] == pytest.approx(1600 / rows.items) and found["epochs"] > 4
    first = lines[0]["seconds"]
    assert lines[0]["step"] == 1 and first > 0, "what the first step took, where a GPU compiles, is no training"
    assert found["often_from_minute"] == pytest.approx((last["seconds"] - first) / 60 * 4 / found["epochs"])
    assert found["train_bound"] == pytest.approx(last["bound"]), "one line in ten falls into the last tenth of 400 steps"
    assert found["tokens"] == 400 * 4 * 16 and found["minutes"] == pytest.approx((last["seconds"] - first) / 60)


def test_a_left_to_right_run_judges_as_it_scores(text: Path, tmp_path: Path) -> None:
    """What the judge says of a row is the run's own exact negative log-likelihood."""
    go("rivals", tmp_path, text, only=["ar", "mdlm"])
    run = open_run(tmp_path / "runs" / "ar")
    rows = eval_rows(TokenStore(text), length=16, layout="packed").batch(0, 3).tokens
    draws = Draws(0, 0, "x", torch.arange(3), 3)
    with torch.no_grad():
        own = run.assembly.objective.loss(run.assembly.model, rows, draws=draws).bound
    nats = token_nats(run_judge(run), rows.tolist(), batch=2)
    assert torch.allclose(torch.stack([row.sum() for row in nats]), own, atol=1e-4)
    with pytest.raises(ConfigError, match="does not read from left to right"):
        run_judge(open_run(tmp_path / "runs" / "mdlm"))


def test_mistakes_are_named(text: Path, tmp_path: Path) -> None:
    for wishes, words in ((Wishes(settings=("train.lr",)), "FIELD=VALUE"), (Wishes(vectors=("x.npy",)), "builds no trees"),
                          (Wishes(settings=("train.lrr=1",)), "no setting 'lrr'")):
        with pytest.raises(ConfigError, match=words):
            go("joint", tmp_path, text, wishes=wishes)
    with pytest.raises(ConfigError, match="mdlm finds its learning rate by trials"):
        go("equal-cost", tmp_path, text, wishes=Wishes(settings=("train.lr=1e-3",)))
    with pytest.raises(ConfigError, match="--minutes must lie"):
        go("equal-cost", tmp_path, text, wishes=Wishes(minutes=0.0))
    with pytest.raises(ConfigError, match="vectors-x"):
        study("trees").runs("toy", Wishes(vectors=("x.npy", "x.npy")))
    with pytest.raises(ConfigError, match="budget study needs --data"):
        go("joint", tmp_path, None, size="budget")
    assert not any(tmp_path.iterdir())


def test_a_study_under_a_clock_travels_without_its_weights(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is begun that would not be done; what is finished is carried on as a few files, and the study goes on from them."""
    said: list[str] = []
    none = go("equal-cost", tmp_path / "none", text, within=0.0, say=said.append)
    assert len(none["late"]) == 68 and not none["runs"] and not (tmp_path / "none" / "runs").exists()
    assert "no time was left for mdlm@0.002" in said[-2]
    first = go("equal-cost", tmp_path / "there", text, only=["mdlm-tied*"], within=60.0)
    assert list(first["runs"]) == ["mdlm-tied", "mdlm-tied-clipped"] and not first["late"]

    size = pack(tmp_path / "there", tmp_path / "there" / "found.tar.gz")
    assert size == pack(tmp_path / "there", tmp_path / "there" / "found.tar.gz"), "it does not pack itself"
    with tarfile.open(tmp_path / "there" / "found.tar.gz") as archive:
        archive.extractall(tmp_path / "here", filter="data")
    inside = sorted(str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file())
    assert len([name for name in inside if name.endswith("tokenizer.json")]) == 5 and not [x for x in inside if "checkpoint" in x]
    trees = list((tmp_path / "here").rglob("tree.safetensors"))
    assert len({path.stat().st_ino for path in trees}) == 1 and Tree.load(trees[0]).height == 1, "equal trees are one file"

    monkeypatch.setattr("tdlm.study.engine.train", lambda *a, **k: pytest.fail("trained again"))
    again = go("equal-cost", tmp_path / "here", text, only=["mdlm-tied*"])
    assert again["scores"] == first["scores"] and again["trials"] == first["trials"] and not again["failed"]
    row = next(line for line in Path(again["table"]).read_text().splitlines() if line.startswith("| mdlm-tied |"))
    rate, tried = first["runs"]["mdlm-tied"]["lr"], (2e-3, 4e-3, 8e-3)
    assert (f"| {rate:g} ({'lowest' if rate == tried[0] else 'highest'} tried) |" in row) == (rate != tried[1])
    other = go("equal-cost", tmp_path / "here", text, only=["mdlm-tied"], wishes=Wishes(settings=("train.seed=2", *SMALL)))
    assert "was made with other settings" in other["failed"]["mdlm-tied"], "finished or not, it is another run"


def test_ngram_models_are_counted_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go("rivals", tmp_path, text, only=["mdlm"])["scores"]["mdlm"]
    monkeypatch.setattr("tdlm.verbs.evaluate.ngram_cross_entropies", lambda *a, **k: pytest.fail("counted again"))
    second = go("rivals", tmp_path, text, only=["mdlm-tied"])["scores"]["mdlm-tied"]
    assert second["ngrams"] == first["ngrams"] and second["ngram_tokens"] == first["ngram_tokens"]
    kept = tmp_path / "runs" / "mdlm" / "eval.json"
    kept.write_text(json.dumps({**first, "documents": 1}))
    (tmp_path / "runs" / "mdlm-tied" / "eval.json").unlink()
    with pytest.raises(pytest.fail.Exception, match="counted again"):  # of other rows they are other numbers
        go("rivals", tmp_path, text, only=["mdlm-tied"])


def test_trees_come_first_where_there_is_no_gpu(text: Path, tmp_path: Path) -> None:
    result = go("joint", tmp_path, text, trees_only=True)
    assert result["trees"] == ["branching-2.safetensors", "branching-4.safetensors"] and not (tmp_path / "runs").exists()
    names = [tree_name({"branching": 2, "vectors": where}) for where in ("a/x.npy", "b/x.npy")]
    assert len(set(names)) == 2 and all("/" not in name for name in names)


def test_the_list_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in STUDIES:
        found = predict(study(name), "toy")
        assert found["about"] and found["count"] == len(study(name).runs("toy"))
    equal = predict(study("equal-cost"), "budget")
    assert equal["minutes"] == 8 * 26 + 2 * 42 and equal["trials"] == 42 and equal["hours"]["H200"] == pytest.approx(292 / 60)
    small = predict(study("rivals"), "full")["runs"]["small"]
    assert small["tokens"]["H200"] == 131_072_000_000
    assert small["hours"]["H200"] == pytest.approx(131_072_000_000 * small["flops_per_token"] / (0.4 * 989e12) / 3600)
    with pytest.raises(SystemExit) as leaving:
        main(["study", "equal-cost", "--list", "--minutes", "2"])
    said = capsys.readouterr().out
    assert not leaving.value.code and "--only overlapping-tied-64" in said and "68 runs (42 of them short" in said
    with pytest.raises(SystemExit) as leaving:
        main(["study"])
    assert leaving.value.code == 2 and "tdlm study NAME --out DIR" in capsys.readouterr().err


def test_moments_of_a_text_and_fences() -> None:
    frames = [{"height": [2 - (step > 3), 2 - (step > 5) - (step > 8)], "evaluations": step} for step in range(10)]
    chosen = moments(frames, 3)
    assert [frame["evaluations"] for frame in chosen] == [0, 6, 9]
    assert _fence("a ``` b ````") == "`````" and _fence("plain") == "```"


def test_vectors_are_needed_until_their_tree_is_built(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.npy"
    np.save(mine, np.random.default_rng(0).normal(size=(258, 4)))
    command = ["study", "trees", "--out", str(tmp_path / "out"), "--data", str(text), "--vectors", str(mine), "--only",
               "vectors-mine", "--device", "cpu", *(word for item in SMALL for word in ("--set", item))]
    for _ in range(2):
        with pytest.raises(SystemExit) as leaving:
            main(command)
        assert leaving.value.code == 0 and "vectors-mine" in capsys.readouterr().out
        mine.unlink(missing_ok=True)
    next((tmp_path / "out" / "trees").iterdir()).unlink()
    with pytest.raises(SystemExit) as leaving:
        main(command)
    assert leaving.value.code == 2 and "no embedding file" in capsys.readouterr().err
