"""An exported model is the run it came from: the same text, the same numbers, and nothing about where it was made."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tdlm.config import RunConfig
from tdlm.data.store import TokenStore
from tdlm.errors import DataError, RunError, TdlmError
from tdlm.model.adaptive import Adaptive
from tdlm.model.head import Tied
from tdlm.objectives.mdlm import MdlmMethod
from tdlm.objectives.tree import TreeMethod
from tdlm.report import write_report
from tdlm.report.read import read_run
from tdlm.train import checkpoint
from tdlm.train.loop import train
from tdlm.train.metrics import Quiet
from tdlm.train.run import Run, open_run
from tdlm.verbs.evaluate import evaluate_run
from tdlm.verbs.export import export_run, placeless
from tdlm.verbs.sample import Request, sample_run
from tdlm.verbs.tree import build_from


def silent(line: str) -> None:
    pass


def trained(config: RunConfig, world: dict[str, Path], out: Path, **changes: object) -> Path:
    """A run whose averaged weights differ from the last ones."""
    config = replace(config, train=replace(config.train, ema=0.9, lr=0.05, **changes))
    place = {"data": world["data"]} if config.method.flat else world
    train(config, **place, out=out, device="cpu", command=f"tdlm train tiny --data {world['data']} --out {out}", progress=Quiet())
    return out


@pytest.fixture(scope="module")
def run(world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.conftest import CONFIG

    out = trained(replace(CONFIG, method=TreeMethod(head=Tied()), backbone=replace(CONFIG.backbone, conditioning="level")), world,
                  tmp_path_factory.mktemp("runs") / "mine")
    evaluate(open_run(out), world)
    sample_run(open_run(out), Request(count=2, seed=5), say=silent)
    return out


def evaluate(run: Run, world: dict[str, Path]) -> float:
    return evaluate_run(run, data=world["data"], split="valid", estimator="auto", pad=None, repeats=2, limit=None, batch=8,
                        seed=0, say=silent)["bound"]


def drawn(run: Run) -> list[list[int]]:
    return [sample["tokens"] for sample in sample_run(run, Request(count=8, seed=3), say=silent, keep=False)["samples"]]


def test_float32_is_the_run_to_the_bit(run: Path, world: dict[str, Path], tmp_path: Path):
    """Averaged weights, the same samples and the same bound; and not the weights of the last step."""
    export_run(run, tmp_path / "out", dtype="float32")
    ours, theirs = open_run(tmp_path / "out"), open_run(run)
    assert ours.step == theirs.step == 12
    for mine, other in zip(ours.assembly.model.parameters(), theirs.assembly.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    last = checkpoint.load(checkpoint.checkpoints(run)[-1]).tensors("model")
    assert any(not torch.equal(value, last[name]) for name, value in ours.assembly.model.named_parameters())
    assert drawn(ours) == drawn(theirs)
    assert evaluate(ours, world) == evaluate(theirs, world)


def test_bfloat16_is_close_and_half_as_large(run: Path, world: dict[str, Path], tmp_path: Path):
    """Every weight is rounded once (8 bits of mantissa), computed with in float32; a second export changes nothing."""
    result = export_run(run, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert result["weights"] == sum(value.numel() for value in tensors.values())
    assert result["bytes"] < 2 * result["weights"] + 120 * len(tensors) + 8
    ours, theirs = open_run(tmp_path / "out"), open_run(run)
    for mine, other in zip(ours.assembly.model.parameters(), theirs.assembly.model.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=2**-8, atol=0)
    assert any(not torch.equal(mine, other) for mine, other in
               zip(ours.assembly.model.parameters(), theirs.assembly.model.parameters(), strict=True))
    assert evaluate(ours, world) == pytest.approx(evaluate(theirs, world), rel=0.01)
    export_run(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert drawn(open_run(tmp_path / "again")) == drawn(ours)


def test_whole_numbers_are_not_rounded(config: RunConfig, world: dict[str, Path], tmp_path: Path):
    """The adaptive head's order of tokens is part of its state: 257 has no place in bfloat16."""
    config = replace(config, method=MdlmMethod(head=Adaptive(cutoffs=(20, 60))))
    flat = trained(config, world, tmp_path / "flat", steps=4, warmup=1)
    export_run(flat, tmp_path / "out")
    name = "predictor.rank"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name],
                       checkpoint.load(checkpoint.checkpoints(flat)[-1]).tensors("model")[name])
    open_run(tmp_path / "out")


def test_the_folder_tells_everything_and_no_place(run: Path, world: dict[str, Path], tmp_path: Path):
    out = tmp_path / "out"
    export_run(run, out, about="Made of seven words.\n")
    files = {path.name for path in out.iterdir()}
    assert files == {"README.md", "config.json", "eval.json", "manifest.json", "metrics.jsonl", "model.safetensors", "state.json",
                     "tokenizer.json", "tree.safetensors"}
    for name in files - {"model.safetensors", "tree.safetensors"}:
        text = (out / name).read_text()
        assert str(world["data"]) not in text and str(run.parent) not in text, name
        assert not re.search(r"(?<![\w<])/(tmp|home|root|usr|work)", text), name
    kept = json.loads((out / "config.json").read_text())["provenance"]
    assert kept["command"] == "tdlm train tiny --data data --out mine" and "data" not in kept
    assert kept["data_fingerprint"] == TokenStore(world["data"]).fingerprint
    card, scores = (out / "README.md").read_text(), json.loads((out / "eval.json").read_text())
    assert card.startswith("# tiny\n\nMade of seven words.\n")
    for told in (f"{scores['bound']:.3f}", f"{scores['ngrams']['bigram']:.3f}", f"{scores['bits_per_byte']:.3f}", "12 of 12",
                 f"{12 * 8 * 16:,} tokens", kept["device"], "bfloat16", "averaged", "seed 5"):
        assert told in card, told
    for sample in read_run(run).samples[0]["samples"]:
        assert sample["text"].strip() in card
    again = tmp_path / "again"
    export_run(out, again)
    assert (again / "README.md").read_text().startswith("# tiny\n\nMade of seven words.\n")
    assert "averaged over the run" in (again / "README.md").read_text()
    write_report([out], out / "report.html")
    assert f"{scores['bound']:.3f}" in (out / "report.html").read_text()


def test_its_data_has_to_be_named(run: Path, world: dict[str, Path], tmp_path: Path):
    export_run(run, tmp_path / "out")
    with pytest.raises(DataError, match="--data DIR"):
        open_run(tmp_path / "out").store()
    assert open_run(tmp_path / "out").store(world["data"]).size == TokenStore(world["data"]).size


def test_it_cannot_go_on_but_another_run_can_begin_with_it(run: Path, world: dict[str, Path], tmp_path: Path):
    out, config = tmp_path / "out", open_run(run).config
    export_run(run, out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}
    with pytest.raises(RunError, match=f"--init {out}"):
        train(config, **world, out=out, device="cpu", progress=Quiet())
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"} == before
    config = replace(config, train=replace(config.train, steps=1, warmup=1, ema=None))  # update 0 has rate 0: nothing moves
    train(config, **world, out=tmp_path / "new", device="cpu", progress=Quiet(), init=out)
    assert drawn(open_run(tmp_path / "new")) == drawn(open_run(out))


def test_a_tree_is_built_from_its_rows(run: Path, world: dict[str, Path], tmp_path: Path):
    export_run(run, tmp_path / "out", dtype="float32")
    first, second = (build_from(data=world["data"], vectors=str(path), branching=20, say=silent)[0]
                     for path in (run, tmp_path / "out"))
    assert torch.equal(first.ancestor, second.ancestor) and torch.equal(first.slot, second.slot)


@pytest.mark.parametrize("name", ["model.safetensors", "tree.safetensors", "tokenizer.json"])
def test_a_flipped_bit_is_found(run: Path, tmp_path: Path, name: str):
    export_run(run, tmp_path / "out")
    content = bytearray((tmp_path / "out" / name).read_bytes())
    content[-3] ^= 1
    (tmp_path / "out" / name).write_bytes(content)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        checkpoint.load(tmp_path / "out")
    with pytest.raises(TdlmError):
        open_run(tmp_path / "out")


def test_in_a_process_of_its_own(run: Path, tmp_path: Path):
    """Nothing that this process has imported is needed."""
    command = [sys.executable, "-m", "tdlm", "export", str(run), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 12 and open_run(tmp_path / "out").step == 12


def test_what_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(RunError, match="exists already"):
        export_run(run, tmp_path)
    with pytest.raises(RunError, match="is no run"):
        export_run(tmp_path, tmp_path / "out")
    shutil.copytree(run, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    with pytest.raises(RunError, match="no weights to export"):
        export_run(tmp_path / "empty", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


@pytest.mark.parametrize("text, left", [
    ("/usr/bin/tdlm train demo --out /tmp/a/run0 --data ../data", "tdlm train demo --out run0 --data data"),
    ("python ~/me/x.py --set a=/b/c", "python x.py --set a=c"), ("./run", "run"), ("runs/mine", "runs/mine"),
    ("nats/token, 1 / 2, and/or", "nats/token, 1 / 2, and/or"), ("hf:owner/model", "hf:owner/model"),
    ("https://example.org/a/b", "https://example.org/a/b")])
def test_places(text: str, left: str):
    assert placeless({"a": [text], "n": 1}) == {"a": [left], "n": 1}
