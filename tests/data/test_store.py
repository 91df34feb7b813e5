"""A prepared folder that is missing, unfinished, damaged or of another tokenizer is named; its stream is whole."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.data.prepare import prepare
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import DataError, TokenizerError

TEXTS = ["a", "bcd", "efghij", "k", "lmnopqrstuvw", "xyz"]


def make(folder: Path, *, shard_tokens: int = 6, tokenizer: Tokenizer | str = "bytes") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([folder / "a.jsonl"], folder / "out", tokenizer=tokenizer, valid=2, shard_tokens=shard_tokens)
    return folder / "out"


def test_stream_joins_shards(tmp_path: Path):
    store = TokenStore(make(tmp_path))
    whole = np.concatenate([[*text.encode(), 256] for text in TEXTS])
    assert len(store.manifest["shards"]) == 4
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert store.stream(start, stop).tolist() == whole[start:stop].tolist()
    for start, stop in ((-1, 2), (3, 2), (0, len(whole) + 1)):
        with pytest.raises(DataError, match="numbered 0 to"):
            store.stream(start, stop)


def test_documents_and_splits(tmp_path: Path):
    store = TokenStore(make(tmp_path), verify=True)
    assert [bytes(store.document(number).tolist()).decode() for number in store.documents("valid")] == TEXTS[4:]
    assert store.tokens("valid") == sum(map(len, TEXTS[4:])) + 2
    assert store.counts[256] == 4 and store.counts.sum() == store.tokens("train")
    with pytest.raises(DataError, match="no split 'test', but train, valid"):
        store.documents("test")
    with pytest.raises(DataError, match="numbered 0 to 5, got 6"):
        store.document(6)


def test_without_eos_documents_touch(tmp_path: Path):
    plain = Tokenizer(json.loads(Tokenizer.from_bytes().to_json()), eos="", bos="")
    store = TokenStore(make(tmp_path, tokenizer=plain))
    assert (store.eos_id, store.bos_id) == (None, None)
    assert bytes(store.stream(0, 4).tolist()) == b"abcd"
    assert bytes(store.document(1).tolist()) == b"bcd"


def test_fingerprint_is_of_the_content(tmp_path: Path):
    first, second = TokenStore(make(tmp_path / "a")), TokenStore(make(tmp_path / "b"))
    assert first.fingerprint == second.fingerprint
    assert TokenStore(make(tmp_path / "c", shard_tokens=99)).fingerprint != first.fingerprint


def test_missing_and_unfinished_folders(tmp_path: Path):
    with pytest.raises(DataError, match="no such folder; make it with: tdlm prepare"):
        TokenStore(tmp_path / "data")
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="not a prepared folder"):
        TokenStore(tmp_path / "data")
    (tmp_path / "later.partial").mkdir()
    with pytest.raises(DataError, match="same 'tdlm prepare' command continues"):
        TokenStore(tmp_path / "later")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_or_missing_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    out = make(tmp_path_factory.mktemp("flip"))
    name = data.draw(st.sampled_from(sorted(path.name for path in out.iterdir() if path.name != "manifest.json")))
    raw = bytearray((out / name).read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    (out / name).write_bytes(raw)
    with pytest.raises(DataError, match=rf"{name}: content is damaged"):
        TokenStore(out, verify=True)
    (out / name).write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{name}: {len(raw)} bytes are expected, found {len(raw) - 1}"):
        TokenStore(out)
    (out / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: .* no such file"):
        TokenStore(out)


def test_manifests_of_another_kind(tmp_path: Path):
    out = make(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    for wrong, message in (({"format": 2}, "format 1 is expected, found 2"), ({"dtype": "nothing"}, "damaged"),
                           ({"documents": 5}, "does not fit the manifest"), ({"shards": None}, "damaged")):
        (out / "manifest.json").write_text(json.dumps({**manifest, **wrong}))
        with pytest.raises(DataError, match=message):
            TokenStore(out)
    (out / "manifest.json").write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        TokenStore(out)
    (out / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "0" * 32}))
    with pytest.raises(TokenizerError, match="not the tokenizer this folder was prepared with"):
        _ = TokenStore(out).tokenizer
