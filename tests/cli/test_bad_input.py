"""Whatever is typed wrongly ends with one line that says what, exit code 2, and nothing half-written on the disk."""
from __future__ import annotations

import itertools
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tdlm.cli import main
from tests.cli.conftest import SMALL, Tdlm, listing, refused

TRAIN = "train demo --data data --tree tree --out new "
BUILD = "tree build --data data --out new "

MISTAKES = [
    # what was typed, what the line says
    ("evl run", "no command 'evl'; did you mean 'eval'?"),
    ("frobnicate", "no command 'frobnicate'; known are "),
    ("--verbose", "unrecognized options: --verbose"),
    ("eval run --repeat 3", "did you mean --repeats? (see: tdlm eval --help)"),
    ("tree bild", "unrecognized options: bild; available subcommands: build, show (see: tdlm tree --help)"),
    ("tree", "expected one of {build, show}"),
    ("prepare", "missing from tdlm prepare: --out PATH (see: tdlm prepare --help)"),
    ("prepare text.jsonl --out", "missing value for argument '--out'"),
    ("eval", "missing from tdlm eval: RUN"),
    ("eval run run", "unrecognized options: run"),
    ("sample run --count few", "--count: a whole number is expected, got 'few'"),
    ("sample run --top-p much", "--top-p: a number is expected, got 'much'"),
    ("report", "at least one run"),
    ("prepare text.jsonl --out new --errors ignore", "invalid choice 'ignore' for argument '--errors'"),
    # prepare
    ("prepare gone.txt --out new", "gone.txt: no such file or folder"),
    ("prepare folder --out new", "holds no file that can be read"),
    ("prepare tree --out new", "this kind of file cannot be read; supported are .txt"),
    ("prepare --out new", "at least one input"),
    ("prepare text.jsonl --out new --tokenizer bpe:12", "at least 258 ids"),
    ("prepare text.jsonl --out new --tokenizer bpe:x", "bpe:SIZE"),
    ("prepare text.jsonl --out new --tokenizer bpe:999999999", "more than 4,000,000 ids is not trained, got 999,999,999"),
    ("prepare text.jsonl --out new --tokenizer gone", "gone: a tokenizer.json or the name 'bytes' is expected"),
    ("prepare text.jsonl --out new --tokenizer text.jsonl", "text.jsonl: a tokenizer.json is expected, but the file cannot"),
    ("prepare text.jsonl --out new --valid 40", "has 40 documents, setting aside 40 for validation leaves none"),
    ("prepare text.jsonl --out new --valid many", "--valid is a number of documents or a fraction such as 0.01, got 'many'"),
    ("prepare text.jsonl --out new --valid 1.5", "fraction between 0 and 1, got 1.5"),
    ("prepare text.jsonl --out new --valid -1", "-1"),
    ("prepare text.jsonl --out new --text-field body", "no field 'body', but 'text'"),
    ("prepare text.jsonl --out new --workers 0", "workers must be at least 1, got 0"),
    ("prepare text.jsonl --out data --tokenizer bytes --valid 9", "valid: was 1, is now 9); choose another --out, or delete"),
    ("prepare text.jsonl --out folder/../run", "exists and is no prepared folder"),
    ("prepare hf:x --out new", "expected is hf:OWNER/NAME"),
    # trees
    ("tree build --out new", "a tree needs a vocabulary: --data DIR"),
    (BUILD + "--tokenizer bytes", "give either --data or --tokenizer"),
    ("tree build --tokenizer bytes --out new", "corpus statistics need text: give --data DIR"),
    ("tree build --data gone --out new", "gone: no such folder; make it with: tdlm prepare"),
    ("tree build --data folder --out new", "folder: not a prepared folder (no manifest.json)"),
    ("tree build --data data --out folder", "folder is a folder; a tree is a file: --out folder/tree.safetensors"),
    (BUILD + "--window 0", "neighbours stand 1 to 1024 places away, got --window 0"),
    (BUILD + "--method exchange --window 100000", "neighbours stand 1 to 1024 places away, got --window 100000"),
    (BUILD + "--contexts 0", "got --contexts 0"),
    (BUILD + "--branching 1", "branching factor must be at least 2, got 1"),
    (BUILD + "--branching 1.5", "whole number is expected, got '1.5'"),
    (BUILD + "--branching 8 --height 2", "258 tokens do not fit a tree of K=8 and 2 levels"),
    (BUILD + "--branching 17 --height 4 --method random", "came out 2 levels high, 4 were asked for"),
    (BUILD + "--min-ratio 2", "0 <= min <= 1 <= max"),
    (BUILD + "--max-depth 1 --branching 2", "use K >= 258, or 9 levels or more"),
    (BUILD + "--vectors gone.npy", "no embedding file gone.npy"),
    (BUILD + "--vectors nan.npy", "vector of token 7 is not finite"),
    (BUILD + "--vectors small.npy", "40 token vectors for a vocabulary of 258; the embedding belongs to another tokenizer"),
    (BUILD + "--vectors zero.npy", "every token vector is zero"),
    (BUILD + "--vectors folder", "holds no .safetensors file"),
    (BUILD + "--vectors gone", "no checkpoint gone; give a .safetensors file, a folder, or an owner/model"),
    (BUILD + "--method random --vectors corpus", "--method random looks at no vectors"),
    (BUILD + "--tensor x", "--tensor names a tensor"),
    (BUILD + "--device toaster", "unknown device 'toaster'; use cpu, cuda or cuda:N"),
    (BUILD + "--method best", "invalid choice 'best'"),
    ("tree show gone", "no tree file gone"),
    ("tree show text.jsonl", "cannot be read as a tree"),
    ("tree show data", "no tree.safetensors"),
    ("tree show other.tree --data data", "was built for tokenizer"),
    # training
    ("train tinny --dry-run", "no recipe 'tinny'; did you mean 'tiny'?"),
    ("train", "missing from tdlm train: RECIPE"),
    ("train tiny", "training needs --data and --tree and --out (only --dry-run does without)"),
    (TRAIN + "--set train.lr", "FIELD=VALUE is expected, for example --set train.lr=3e-4"),
    (TRAIN + "--set train.lr=fast", "--set train.lr: a number is expected, got 'fast'"),
    (TRAIN + "--steps 0", "at least 1, got 0"),
    (TRAIN + "--set train.stops=3", "no setting 'stops'; did you mean 'steps'?"),
    (TRAIN + "--batch 0", "train.batch must be at least 1"),
    (TRAIN + "--set method.head=tide", "unknown kind 'tide'; did you mean 'tied'?"),
    (TRAIN + "--set train.lr.x=3", "below a plain value"),
    (TRAIN + "--set method.head=cascade", "'cascade' is no head; known are"),
    (TRAIN + "--set data.length=0", "data.length must be at least 1"),
    (TRAIN + "--set data.length=99999", "fewer than one packed row of 99999"),
    (TRAIN + "--device toaster", "unknown device 'toaster'"),
    (TRAIN + "--plugin nosuch", "--plugin nosuch: no such module"),
    (TRAIN + "--set train.micro_batch=7", "must divide train.batch=32, got 7"),
    (TRAIN + "--set method.process=overlapping --set backbone.conditioning=level", "needs a process with one level at a time"),
    ("train demo --data data --tree other.tree --out new", "built for tokenizer"),
    (TRAIN + "--compile maybe", "invalid choice 'maybe'"),
    ("train demo --data data --tree gone --out new", "no tree file gone"),
    ("train demo --data gone --tree tree --out new", "gone: no such folder"),
    ("train demo --data data --tree text.jsonl --out new", "text.jsonl cannot be read as a tree"),
    ("train demo --data data --tree tree --out data", "data holds 'counts.bin' but no config.json, so it is no run"),
    ("train demo --dry-run --vocabulary 1", "at least 2 tokens"),
    ("train demo --dry-run --branching 0", "2 children"),
    # using a run
    ("eval gone", "no run folder gone; train one: tdlm train"),
    ("eval data", "data is no run (no config.json)"),
    ("eval file", "no run folder file"),
    ("eval run --split test", "no split 'test', but train, valid"),
    ("eval run --data other", "other uses tokenizer"),
    ("eval run --data gone", "gone: no such folder"),
    ("eval run --estimator exact", "the estimator 'exact' is not valid"),
    ("eval run --repeats 1", "at least 2 repeats, got 1"),
    ("eval run --rows 0", "a limit of 0"),
    ("eval run --repeats 100000000000000", "out of memory"),
    ("eval run --batch 0", "got --batch 0"),
    ("eval run --device toaster", "unknown device"),
    ("sample gone", "no run folder gone"),
    ("sample run --device toaster", "unknown device"),
    ("sample run --prompt 'far more text than there is room for'", "the prompt has 36 tokens, more than the length 16"),
    ("sample run --steps 1", "1 steps cannot cross the 2 levels of the tree; ask for at least 2"),
    ("sample run --steps 0", "--steps 0"),
    ("sample run --per-level 3", "the tree has 2 levels, got 1 numbers"),
    ("sample run --per-level 3 0", "at least 1 step, got 3/0"),
    ("sample run --times 1 0.5", "falls strictly from 1 to 0"),
    ("sample run --times 1 0 --steps 3", "give one of them"),
    ("sample run --temperature -1", "temperature must be at least 0"),
    ("sample run --top-p 0", "top-p must lie in (0, 1]"),
    ("sample run --min-p 2", "min-p must lie in [0, 1]"),
    ("sample run --count 0", "got --count 0"),
    ("sample run --batch 0", "--batch 0"),
    ("sample run --length 0", "--length 0"),
    ("sample run --sampler best", "no sampler 'best'; known are"),
    ("sample run --gap 2", "needs --infill"),
    ("sample run --infill 'no gap'", "at least one gap ___"),
    ("sample run --infill 'a ___' --prompt b", "either --prompt or --infill"),
    ("sample run --infill 'a ___ b' --gap 90", "1 gaps of 90 do not fit the length 16"),
    ("sample run --infill 'a ___' --gap 0", "--gap 0"),
    ("report gone", "no run folder gone"),
    ("report data", "so it is no run folder"),
    ("report run gone --out new", "no run folder gone"),
    # protocols, other people's text and models
    ("eval run --protocol gidd", "no evaluation protocol 'gidd'; known are gidd-512-nopack, mdlm-1024-pack, strict"),
    ("eval run --protocol gidd-512-nopack", "but this run knows only 16 positions; use --length 16"),
    ("eval run --length 0", "a row has at least one token, got --length 0"),
    ("eval run --length 64", "knows only 16 positions"),
    ("eval run --on wikitxt-103", "did you mean 'wikitext-103'?"),
    ("eval run --on ptb", "ptb"),
    ("eval run --on ptb=gone", "gone: no such file; give the test file of ptb"),
    ("eval run --on ptb=text.jsonl --data data", "either --on or --data"),
    ("eval run --out x.json", "--out and --dtype are for hub models"),
    ("eval hf:gpt2", "give the folder: --data DIR"),
    ("eval hf:gpt2 --data gone", "gone: no such folder"),
    ("eval hf:gpt2 --data data --pad drop", "leave out --estimator and --pad"),
    ("eval hf:gpt2 --data data --repeats 8", "nothing is drawn or repeated; leave out --repeats and --seed"),
    ("eval hf:gpt2 --data data --seed 1", "leave out --repeats and --seed"),
    ("eval hf:gpt2 --data data --protocol x", "no evaluation protocol 'x'"),
    # judged text
    ("quality run", "--samples FILE"), ("quality run --count 2 --samples x.json", "not both"),
    ("quality run --count 0", "at least 1 is expected, got --count 0"),
    ("quality run --count 1 --batch 0", "got --batch 0"), ("quality run --count 1 --max-length 0", "got --max-length 0"),
    ("quality run --samples gone.json", "gone.json: no such file of samples"),
    ("quality run --samples run/config.json", "run/config.json: these are no samples"),
    ("quality run --steps 3", "they need --count N"),
    ("quality run --count 1 --temperature nan", "temperature"), ("quality run --count 1 --top-p 3", "top-p"),
    ("quality run --count 1 --sampler euler", "no sampler 'euler'"),
    ("quality folder --count 1", "folder is no run"),
    # many runs
    ("compare --out new", "no run to compare"), ("compare run", "missing from tdlm compare: --out"),
    ("report compare run folder --out new", "so it is no run folder"),
    ("compare run --out file", "cannot be written to file"),
    ("compare run --out new --protocol gidd-512-nopack", "make it: tdlm eval run --protocol gidd-512-nopack"),
    ("compare run --out new --protocol 'strict with length=8, pad=count'",
     "make it: tdlm eval run --protocol strict --length 8 --pad count"),
    ("compare run --out new --on ptb", "make it: tdlm eval run"),
    ("study rival --out new", "no study 'rival'; did you mean 'rivals'?"),
    ("study rivals", "--out"), ("study rivals --out new --only nobody", "nobody"),
    ("study rivals --out new --size full", "--data DIR"), ("study rivals --out new --size huge", "invalid choice 'huge'"),
    ("study rivals --out new --data gone", "gone: no such folder"),
    ("study rivals --out new --data data --minutes 1",
     "--minutes bounds no run of study rivals at size toy: their steps do, which --set train.steps=N changes"),
    ("study equal-cost --out new --data data --minutes 1 --set train.steps=2", "leave out --minutes"),
    ("study rivals --out file --data data", "file is a file; a study needs a folder"),
    ("study trees --out new --data data --vectors text.jsonl", "text.jsonl is no safetensors file"),
    ("study trees --out new --data data --vectors small.npy", "40 token vectors for a vocabulary of 258"),
    ("study trees --out new --vectors small.npy", "40 token vectors for a vocabulary of 258"),
    ("study trees --out new --data other --vectors run", "run was trained with tokenizer"),
    ("study trees --out new --size budget --vectors small.npy", "needs --data DIR"),
    ("study trees --out new --data data --vectors gone.npy", "no embedding file gone.npy"),
    ("study trees --out new --data data --vectors folder/gone.safetensors", "no checkpoint folder/gone.safetensors"),
    ("study trees --out new --data data --vectors gone", "no checkpoint gone; give a .safetensors file, a folder"),
    ("study branching --out new --data data --judge gpt2", "study branching generates no text for a judge; leave out --judge"),
    ("study small-base --out new --data data --judge ./gone", "gone: no such folder; give the folder of a saved model"),
    ("study small-base --out new --data data --judge gguf:gone.gguf", "no such GGUF file"),
    # published checkpoints
    ("import gidd:gone --out new", "no checkpoint gone"), ("import gidd:folder --out new", "folder holds no .safetensors file"),
    ("import gidd:text.jsonl --out new", "text.jsonl is no safetensors file"), ("import --out new", "CHECKPOINT"),
    ("import gidd:tree --out new", "tree is no safetensors file"), ("import gidd: --out new", "no checkpoint is named"),
    ("import run --out new", "run is a run of this package already: use it as it is"),
    ("import hf:./gone --out new", "no checkpoint ./gone"), ("import gidd:hf:a/b/c --out new", "no checkpoint a/b/c"),
    (TRAIN + "--init gone", "no checkpoint gone"), (TRAIN + "--init folder", "folder holds no .safetensors file"),
    (TRAIN + "--init gidd:folder", "folder holds no .safetensors file"),
    # samplers
    ("sample run --sampler first-hiting", "did you mean 'first-hitting'?"),
    ("sample run --sampler euler", "no sampler 'euler'; known are ancestral, confidence, first-hitting"),
    ("sample run --sampler self-correction", "no sampler 'self-correction'"),
    ("sample run --sampler confidence --times 1 0.5 0", "draws the times of its jumps"),
    ("demo --minutes 0", "--minutes must lie between 0 and 1440, got 0.0"),
    ("demo --minutes nan", "got nan"),
    ("demo --minutes soon", "'soon'"),
    ("demo --out run", "run holds something else than a demo"),
]


@pytest.fixture(scope="module", autouse=True)
def vectors(original: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((258, 4)).astype(np.float32)
    np.save(original / "small.npy", rows[:40])
    np.save(original / "zero.npy", rows * 0)
    rows[7, 2] = np.nan
    np.save(original / "nan.npy", rows)


@pytest.mark.parametrize("typed, says", MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_one_line_and_nothing_written(world: Path, tdlm: Tdlm, typed: str, says: str):
    before = listing(world)
    try:
        refused(tdlm(*shlex.split(typed)), says)
        assert listing(world) == before and not (world / "new").exists() and not (world / "new.partial").exists()
    finally:
        for name in ("new", "new.partial"):
            shutil.rmtree(world / name, ignore_errors=True)


@pytest.mark.parametrize("order", [*itertools.permutations(("heads=2", "width=48", "blocks=1"))], ids=" ".join)
def test_settings_that_belong_together_in_any_order(world: Path, tdlm: Tdlm, order: tuple[str, ...]):
    """12 heads do not go with width 48, and neither half of the change stands alone: only what comes out is judged."""
    settings = [word for setting in order for word in ("--set", f"backbone.{setting}")]
    done = tdlm("train", "mdlm-small", "--dry-run", "--json", *settings)
    assert done.code == 0, done.err
    assert {"heads": 2, "width": 48, "blocks": 1}.items() <= json.loads(done.out)["config"]["backbone"].items()


@pytest.mark.parametrize("name, content, says", [
    ("empty.txt", b"", "no text was found in empty.txt"),
    ("blank.jsonl", b'\n{"text": " "}\n', "no text was found in blank.jsonl"),
    ("latin.txt", b"first\ncaf\xe9", "not UTF-8 at line 2, byte 9 of the text; convert it, or prepare with --errors replace"),
    ("cut.jsonl", b'{"text": "a"}\n{"text', "cut.jsonl: line 2 is no JSON"),
    ("no.txt.gz", b"plain", "not of the kind its name says"),
    ("list.jsonl", b"[1]\n", "an object with a field 'text' is expected"),
    ("number.jsonl", b'{"text": 3}\n', "should be a text, got 3"),
    ("half.jsonl", b'{"text": "\\ud800"}\n', "a lone surrogate) at place 0; mend it, or prepare with --errors replace")])
def test_text_that_cannot_be_prepared(tmp_path: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes,
                                      says: str):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    refused(tdlm("prepare", name, "--out", "new", "--tokenizer", "bytes"), says)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if "--errors replace" in says:
        done = tdlm("prepare", name, "--out", "new", "--tokenizer", "bytes", "--errors", "replace", "--valid", "0")
        assert done.code == 0 and "1 documents" in done.err


def test_too_large_a_validation_set_can_be_corrected(tmp_path: Path, tdlm: Tdlm, monkeypatch: pytest.MonkeyPatch):
    """The advice of the error works: the same command with fewer documents, with a trained and with a given tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": f"text number {n}"}) + "\n" for n in range(9)))
    for tokenizer in ("bpe:260", "bytes"):
        command = ("prepare", "a.jsonl", "--out", tokenizer, "--tokenizer", tokenizer, "--valid")
        refused(tdlm(*command, "9"), "ask for fewer (--valid)")
        assert tdlm(*command, "2").code == 0
        assert not Path(f"{tokenizer}.partial").exists()


def test_fifty_megabytes_in_one_line(tmp_path: Path, tdlm: Tdlm):
    (tmp_path / "line.txt").write_bytes(b"the tree of words " * 2_800_000)
    done = tdlm("prepare", tmp_path / "line.txt", "--out", tmp_path / "data", "--tokenizer", "bytes", "--json")
    manifest = json.loads(done.out)
    assert done.code == 0 and manifest["text_bytes"] == 50_400_000 and manifest["documents"] == 193


def test_another_configuration_is_told_field_by_field(copy: Path, tdlm: Tdlm):
    again = ("train", "demo", "--data", "data", "--tree", "tree", "--out", "run", *SMALL)
    before = listing(copy)
    refused(tdlm(*again, "--seed", "7", "--set", "train.lr=0.5", "--set", "method.process=overlapping"),
            "run was made with other settings (run -> now): ", "train.seed: 1 -> 7", "train.lr: 0.003 -> 0.5",
            "method.process.kind: 'cascade' -> 'overlapping'", "choose a new --out")
    assert tdlm("tree", "build", "--data", "data", "--out", "tree2", "--branching", "20", "--method", "random").code == 0
    refused(tdlm("train", "demo", "--data", "data", "--tree", "tree2", "--out", "run", *SMALL), "tree_hash: ")
    (copy / "tree2").unlink()
    assert listing(copy) == before
    config = json.loads((copy / "run" / "config.json").read_text())
    del config["config"]["train"]["ema"]  # as if it had been begun before there was such a setting
    (copy / "run" / "config.json").write_text(json.dumps(config))
    done = tdlm(*again)
    assert done.code == 0 and "run is complete (3 steps)" in done.err
    refused(tdlm(*again, "--set", "train.ema=0.9"), "(run -> now): train.ema: None -> 0.9;")


def test_a_validation_set_smaller_than_a_batch(copy: Path, tdlm: Tdlm):
    """One document of validation, with rows of documents: everything works on a single row."""
    document = ("--set", "data.layout=document", "--set", "method.pad=count")
    done = tdlm("train", "demo", "--data", "data", "--tree", "tree", "--out", "one", *SMALL, *document)
    assert done.code == 0 and "validation bound" in done.err
    done = tdlm("eval", "one", "--batch", "32", "--json")
    assert done.code == 0 and json.loads(done.out)["documents"] == 1


def test_without_a_validation_set(copy: Path, tdlm: Tdlm):
    assert tdlm("prepare", "text.jsonl", "--out", "all", "--tokenizer", "bytes", "--valid", "0").code == 0
    done = tdlm("train", "demo", "--data", "all", "--tree", "tree", "--out", "none", *SMALL)
    assert done.code == 0 and "no validation" in done.err
    refused(tdlm("eval", "none"), "valid")
    assert tdlm("eval", "none", "--split", "train", "--rows", "4").code == 0


@pytest.mark.parametrize("name, damage, says", [
    ("config.json", b"{", "config.json cannot be read"),
    ("config.json", b'{"config": {}}', "config.json cannot be read"),
    ("tree.safetensors", b"x", "cannot be read as a tree"),
    ("tokenizer.json", b"[]", "tokenizer.json of the tokenizers library"),
    ("tokenizer.json", None, "tokenizer.json"),
    ("tree.safetensors", None, "no tree file"),
    ("checkpoints", None, "no checkpoint"),
    ("checkpoints/step-00000003/model.safetensors", b"x" * 99, "checkpoint")])
def test_damaged_runs(copy: Path, tdlm: Tdlm, name: str, damage: bytes | None, says: str):
    path = copy / "run" / name
    if damage is None:
        path.rename(copy / "aside")
    else:
        path.write_bytes(damage)
    done = tdlm("sample", "run", "--count", "1")
    lines = done.err.splitlines()
    assert done.code == 2 and says in lines[-1] and lines[-1].startswith("tdlm: ") and len(lines) <= 2, done.err


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_too_little_memory_is_one_line_and_our_own_mistakes_are_not(world: Path, tdlm: Tdlm, error: Exception,
                                                                    monkeypatch: pytest.MonkeyPatch):
    def work(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("tdlm.verbs.evaluate.evaluate_run", work)
    refused(tdlm("eval", "run"), "out of memory; a smaller batch")
    error = RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes"):
        main(["eval", "run"])
