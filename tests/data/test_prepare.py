"""The prepared folder is a function of text and settings: not of workers, nor of kills and stops in between."""
from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tdlm.data import prepare as module
from tdlm.data import shards
from tdlm.data.prepare import Progress, prepare
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer, train_bpe
from tdlm.errors import DataError, TdlmError

OWN = train_bpe(["the cat sat on the mat and the dog sat on the log while it rained and rained"], 300)


def write_corpus(path: Path, documents: int, seed: int = 0, words: int = 60) -> list[str]:
    draw = np.random.default_rng(seed)
    names = np.array(["cat", "dog", "mat", "rain", "sat", "on", "the", "and", "日本", "é"])
    texts = [" ".join(names[draw.integers(0, len(names), draw.integers(1, words))]) for _ in range(documents)]
    blank = ["\n" if k % 7 == 0 else '{"text": ""}\n' * (k % 5 == 0) for k in range(documents)]
    rows = [json.dumps({"text": text}) + "\n" + after for text, after in zip(texts, blank, strict=True)]
    path.write_text("".join(rows), encoding="utf-8")
    return texts


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("tokenizer", ["bytes", OWN], ids=["bytes", "bpe"])
def test_store_gives_back_the_documents(tmp_path: Path, tokenizer: Tokenizer | str):
    texts = write_corpus(tmp_path / "a.jsonl", 100)
    told: list[Progress] = []
    manifest = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=tokenizer, valid=7, shard_tokens=700,
                       progress=told.append)
    store = TokenStore(tmp_path / "out", verify=True)
    assert manifest == store.manifest
    assert [store.tokenizer.decode(store.document(number)) for number in range(100)] == texts
    assert store.documents("train") == range(93) and store.documents("valid") == range(93, 100)
    assert len(manifest["shards"]) > 3 and manifest["documents"] == 100
    assert manifest["empty_documents_skipped"] == sum(k % 5 == 0 and k % 7 != 0 for k in range(100))
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    stream = store.stream(0, store.tokens("train") + store.tokens("valid"))
    assert stream.dtype == np.uint16 and (stream == store.eos_id).sum() == 100
    assert np.array_equal(store.counts, np.bincount(stream[:store.tokens("train")], minlength=store.size))
    assert (told[-1].documents, told[-1].fraction, told[-1].resumed) == (100, 1.0, 0)
    assert not (tmp_path / "out.partial").exists()


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    data = json.loads(Tokenizer.from_bytes().to_json())
    data["model"]["vocab"].update({f"word{k}": k for k in range(258, 66_000)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    write_corpus(tmp_path / "a.jsonl", 5)
    manifest = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert manifest["dtype"] == "uint32"
    assert TokenStore(tmp_path / "out").document(0).dtype == np.uint32


def test_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 500)
    write_corpus(tmp_path / "a.jsonl", 300)
    for workers in (1, 5):
        prepare([tmp_path / "a.jsonl"], tmp_path / f"out{workers}", tokenizer=OWN, workers=workers, shard_tokens=2000)
    assert content(tmp_path / "out1") == content(tmp_path / "out5")
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_trained_tokenizer_and_separate_validation(tmp_path: Path):
    write_corpus(tmp_path / "train text.jsonl", 50)
    write_corpus(tmp_path / "valid.jsonl", 9, seed=1)
    manifest = prepare([tmp_path / "train text.jsonl"], tmp_path / "out", tokenizer="bpe:290",
                       valid_inputs=[tmp_path / "valid.jsonl"])
    assert manifest["splits"] == {"train": [0, 50], "valid": [50, 59]}
    assert [(source["split"], source["documents"]) for source in manifest["sources"]] == [("train", 50), ("valid", 9)]
    assert 258 < manifest["vocabulary"] <= 290
    assert prepare(tmp_path / "train text.jsonl", tmp_path / "out", tokenizer="bpe:290",
                   valid_inputs=tmp_path / "valid.jsonl") == manifest
    with pytest.raises(DataError, match="not both"):
        prepare([tmp_path / "valid.jsonl"], tmp_path / "no", valid=1, valid_inputs=[tmp_path / "valid.jsonl"])


def test_one_document_is_cut_in_two(tmp_path: Path):
    text = "the cat sat on the mat. " * 40
    (tmp_path / "a.txt").write_text(text)
    for valid, share in ((0.25, 0.25), (1, 0.1), (None, 0.01)):
        out = tmp_path / f"out{valid}"
        manifest = prepare([tmp_path / "a.txt"], out, tokenizer="bytes", valid=valid, shard_tokens=1)
        store = TokenStore(out, verify=True)
        assert manifest["splits"] == {"train": [0, 1], "valid": [1, 2]}
        assert store.tokenizer.decode(store.document(0)) + store.tokenizer.decode(store.document(1)) == text
        assert len(store.document(1)) == round(len(text) * share)
    assert prepare([tmp_path / "a.txt"], tmp_path / "all", tokenizer="bytes", valid=0)["splits"]["valid"] == [1, 1]
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match="cannot be split"):
        prepare([tmp_path / "b.txt"], tmp_path / "tiny", tokenizer="bytes")


def test_a_long_single_line(tmp_path: Path):
    (tmp_path / "line.txt").write_bytes(b"the cat " * 250_000)
    manifest = prepare([tmp_path / "line.txt"], tmp_path / "out", tokenizer="bytes")
    assert manifest["documents"] == 8 and manifest["text_bytes"] == 2_000_000
    assert manifest["tokens"] == 2_000_008


def test_second_call_returns_at_once_and_other_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_corpus(tmp_path / "a.jsonl", 20)
    first = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    with monkeypatch.context() as patch:
        patch.setattr(module, "tokenized", None)  # nothing is read again
        assert prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", workers=3) == first
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match=r"valid: was 0\.01, is now 0\.5.*choose another --out"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", valid=0.5)
    with pytest.raises(DataError, match="tokenizer: was "):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=OWN)
    write_corpus(tmp_path / "a.jsonl", 30)
    with pytest.raises(DataError, match=r"a\.jsonl: size: was \d+, is now \d+"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    assert content(tmp_path / "out") == before


def test_bad_requests_leave_nothing_behind(tmp_path: Path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("x")
    before = sorted(tmp_path.iterdir())
    for name, wanted, message in (
            ("empty.txt", {}, r"no text was found in .*empty\.txt \(1 empty"), ("latin.txt", {}, "not UTF-8"),
            ("two.jsonl", {"valid": 1.5}, "fraction"), ("two.jsonl", {"errors": "ignore"}, "strict"),
            ("two.jsonl", {"valid": True}, "fraction"), ("two.jsonl", {"shard_tokens": 0}, "at least 1"),
            ("two.jsonl", {"tokenizer": "bpe:many"}, "bpe:4096"), ("two.jsonl", {"tokenizer": "nothing"}, "tokenizer"),
            ("two.jsonl", {"limit": 1}, "at least 8"), ("two.jsonl", {"workers": -1}, "at least 1"),
            ("two.jsonl", {"valid_inputs": [tmp_path / "empty.txt"]}, "no text was found in the validation files"),
            ("two.jsonl", {"text_field": "body"}, "no field 'body'")):
        with pytest.raises(TdlmError, match=message) as caught:
            prepare([tmp_path / name], tmp_path / "out", **{"tokenizer": "bytes", **wanted})
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no prepared folder"):
        prepare([tmp_path / "two.jsonl"], tmp_path / "full", tokenizer="bytes")
    with pytest.raises(DataError, match="cannot be written"):
        prepare([tmp_path / "two.jsonl"], tmp_path / "two.jsonl" / "out", tokenizer="bytes")
    assert sorted(tmp_path.iterdir()) == before


def test_too_much_validation_can_be_mended_without_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_corpus(tmp_path / "a.jsonl", 4)
    with pytest.raises(DataError, match="has 4 documents, setting aside 4 for validation leaves none"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", valid=4)
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", valid=3)["splits"]["train"] == [0, 1]


def test_two_writers(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", 3)
    (tmp_path / "out.partial").mkdir()
    handle = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(DataError, match="another process is preparing"):
            prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    finally:
        os.close(handle)
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")


def _interrupted_at(call: int, monkeypatch: pytest.MonkeyPatch, error: BaseException, *arguments, **settings):
    """Prepare, but the `call`-th time a file is made durable, an error comes instead."""
    calls = iter(range(10_000))
    real = os.fsync

    def failing(handle: int) -> None:
        if next(calls) == call:
            raise error
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", failing)
        return prepare(*arguments, **settings)


def test_stops_and_full_disks_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 500)
    write_corpus(tmp_path / "a.jsonl", 120)
    same = {"tokenizer": OWN, "shard_tokens": 400, "workers": 2}
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", **same)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_at(9, monkeypatch, KeyboardInterrupt(), [tmp_path / "a.jsonl"], tmp_path / "out", **same)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=r"unfinished .* other settings \(shard_tokens: was 400, is now 40"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=OWN, shard_tokens=40)
    with pytest.raises(DataError, match=r"cannot be written \(No space left.*same command continues"):
        _interrupted_at(9, monkeypatch, OSError(28, "No space left on device"), [tmp_path / "a.jsonl"],
                        tmp_path / "out", **same)
    told: list[Progress] = []
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", progress=told.append, **same)
    assert told[-1].resumed > 20
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def _killed_at(call: int, corpus: Path, out: Path, **settings) -> bool:
    """Prepare in a child that is killed the `call`-th time it makes something durable. Whether it came that far."""
    child = os.fork()
    if child == 0:
        calls = iter(range(10_000))
        real = os.fsync

        def deadly(handle: int) -> None:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        shards.os.fsync = deadly
        try:
            prepare([corpus], out, **settings)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_moment(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", 60)
    same = {"tokenizer": "bytes", "shard_tokens": 1500, "workers": 1}
    whole = prepare([tmp_path / "a.jsonl"], tmp_path / "whole", **same)
    assert len(whole["shards"]) > 3
    call = 0
    while _killed_at(call, tmp_path / "a.jsonl", tmp_path / f"out{call}", **same):
        out = tmp_path / f"out{call}"
        if out.exists():  # only the very last fsync stands behind the renaming
            assert content(out) == content(tmp_path / "whole")
        prepare([tmp_path / "a.jsonl"], out, **same)
        assert content(out) == content(tmp_path / "whole")
        call += 1
    assert call > 15


def test_kill_from_outside_then_the_same_command(tmp_path: Path):
    corpus = tmp_path / "a.jsonl"
    write_corpus(corpus, 6000, words=200)
    OWN.save(tmp_path / "tokenizer.json")
    code = ("import sys; from tdlm.data.prepare import prepare; "
            "prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], shard_tokens=30_000)")
    command = [sys.executable, "-c", code, str(corpus), str(tmp_path / "out"), str(tmp_path / "tokenizer.json")]
    paths = os.pathsep.join([str(Path(module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, env=environment)
    journal, end = tmp_path / "out.partial" / shards.JOURNAL, time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if journal.exists() and len(json.loads(journal.read_text())["shards"]) >= 3:
            break
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists() and journal.exists()
    finished = len(json.loads(journal.read_text())["shards"])
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("shard-*")}
    subprocess.run(command, env=environment, check=True, timeout=60)
    prepare([corpus], tmp_path / "whole", tokenizer=tmp_path / "tokenizer.json", shard_tokens=30_000)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    kept = [shards.shard_name(number) for number in range(finished)]
    assert [(tmp_path / "out" / name).stat().st_mtime_ns for name in kept] == [times[name] for name in kept]


def test_damaged_partial_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_corpus(tmp_path / "a.jsonl", 120)
    same = {"tokenizer": "bytes", "shard_tokens": 2000, "workers": 1}
    partial = tmp_path / "out.partial"
    for name, action in (("shard-00000.bin", "write"), (shards.STARTS, "write"), (shards.JOURNAL, "write"),
                         ("shard-00000.bin", "remove")):
        with pytest.raises(KeyboardInterrupt):
            _interrupted_at(9, monkeypatch, KeyboardInterrupt(), [tmp_path / "a.jsonl"], tmp_path / "out", **same)
        if action == "remove":
            (partial / name).unlink()
        else:
            (partial / name).write_bytes(b"{")
        with pytest.raises(DataError, match=f"{name}: .*delete "):
            prepare([tmp_path / "a.jsonl"], tmp_path / "out", **same)
        for path in partial.iterdir():
            path.unlink()
