"""Rows are pure functions of (seed, step, sample): ranks, micro-batches and call order cannot change them."""
from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.data.batches import LAYOUTS, TrainRows, eval_rows, prefetch
from tdlm.data.prepare import prepare
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import ConfigError, DataError

SIZES = [1, 2, 3, 5, 8, 13, 4, 6, 19, 7, 9, 11, 6]  # of the documents; no character occurs twice in them
PAD, MARK = 257, 256


@pytest.fixture(scope="module", params=["marks", "no marks"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("store")
    characters = iter(map(chr, range(33, 127)))
    texts = ["".join(itertools.islice(characters, size)) for size in SIZES]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer.from_bytes()
    if request.param == "no marks":
        tokenizer = Tokenizer(json.loads(tokenizer.to_json()), eos="", bos="")
    prepare([folder / "a.jsonl"], folder / "out", tokenizer=tokenizer, valid=3, shard_tokens=40)
    return TokenStore(folder / "out")


def whole(store: TokenStore, number: int) -> list[int]:
    """A document as the layout `document` shows it: BOS + text + EOS."""
    marks = [MARK] if store.eos_id is not None else []
    return marks + store.document(number).tolist() + marks


@settings(max_examples=60)
@given(step=st.integers(0, 50), length=st.integers(1, 16), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 3),
       shares=st.sampled_from([(1, 2), (2, 1), (2, 3), (3, 4), (12, 1), (1, 12)]))
def test_ranks_and_micro_batches_put_together_are_the_batch(store, step, length, layout, seed, shares):
    world, micros = shares
    rows = TrainRows(store, length=length, layout=layout, batch=12, seed=seed)
    batch = rows.batch(step)
    assert batch.tokens.shape == (12, length) and batch.tokens.dtype == torch.int64
    parts = [rows.batch(step, rank, world, micro, micros) for rank in range(world) for micro in range(micros)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.cat([part.rows for part in parts]).tolist() == batch.rows.tolist() == list(range(12))
    fresh = TrainRows(store, length=length, layout=layout, batch=12, seed=seed)
    fresh.batch(step + 3)
    assert torch.equal(fresh.batch(step).tokens, batch.tokens)


@settings(max_examples=40)
@given(seed=st.integers(0, 100), batch=st.integers(1, 13), length=st.integers(4, 40))
def test_document_rows_are_windows_and_an_epoch_shows_each_document_once(store, seed, batch, length):
    rows = TrainRows(store, length=length, layout="document", batch=batch, seed=seed)
    assert rows.items == 10
    steps = -(-30 // batch)
    seen = torch.cat([rows.batch(step).tokens for step in range(steps)])[:30].tolist()
    documents = [whole(store, number) for number in range(10)]
    windows = [[document] if len(document) <= length else
               [document[at:at + length] for at in range(len(document) - length + 1)] for document in documents]
    for epoch in range(3):
        left = list(range(10))
        for row in seen[epoch * 10:(epoch + 1) * 10]:
            content = row[:row.index(PAD)] if PAD in row else row
            assert row[len(content):] == [PAD] * (length - len(content))
            fits = [number for number in left if content in windows[number]]
            assert len(fits) == 1, f"{row} is no window of a document that is left in epoch {epoch}"
            left.remove(fits[0])


def test_every_window_is_equally_likely_and_orders_differ(store: TokenStore):
    length, long = 16, whole(store, 8)
    windows = [long[at:at + length] for at in range(len(long) - length + 1)]
    rows = TrainRows(store, length=length, layout="document", batch=500, seed=5)
    seen = [row for step in range(40) for row in rows.batch(step).tokens.tolist() if row in windows]
    counts = np.bincount([windows.index(row) for row in seen], minlength=len(windows))
    expected = len(seen) / len(windows)
    assert len(seen) == 2000  # 20,000 samples are 2,000 epochs
    assert (abs(counts - expected) < 5 * expected**0.5).all(), counts
    alone = TrainRows(store, length=length, layout="document", batch=1, seed=5)
    places = {windows.index(row) for step in range(400) for row in alone.batch(step).tokens.tolist() if row in windows}
    assert len(places) == len(windows)  # a document's place in the batch does not decide its crop
    first = [TrainRows(store, length=length, layout="document", batch=10, seed=seed).batch(0).tokens.tolist()
             for seed in range(4)]
    epochs = [TrainRows(store, length=length, layout="document", batch=10, seed=0).batch(step).tokens.tolist()
              for step in range(3)]
    assert len({str(one) for one in first}) == 4 and len({str(one) for one in epochs}) == 3


@settings(max_examples=30)
@given(length=st.integers(1, 30), seed=st.integers(0, 9))
def test_packed_epochs_are_the_stream(store, length, seed):
    rows = TrainRows(store, length=length, layout="packed", batch=1, seed=seed)
    stream = store.stream(*store.token_range("train"))
    assert rows.items == len(stream) // length
    seen = torch.cat([rows.batch(step).tokens for step in range(rows.items)])
    expected = stream[:rows.items * length].reshape(rows.items, length).tolist()
    assert sorted(seen.tolist()) == sorted(expected)
    assert PAD not in seen


def test_evaluation_rows_are_fixed_by_the_document_alone(store: TokenStore):
    rows = eval_rows(store, length=5, layout="document")
    assert len(rows) == 3 and [number for _, number in rows] == [0, 1, 2]
    for tokens, number in rows:
        document = whole(store, 10 + number)
        assert tokens.tolist() in [document[at:at + 5] for at in range(len(document) - 4)]
    some = eval_rows(store, length=5, layout="document", documents=[2, 0])
    assert torch.equal(some[0][0], rows[2][0]) and torch.equal(some[1][0], rows[0][0])
    assert len(eval_rows(store, length=5, layout="document", limit=2)) == 2
    batches = list(rows.batches(64))  # a validation set smaller than a batch
    assert [batch.tokens.shape for batch in batches] == [(3, 5)]
    assert torch.equal(torch.cat([batch.tokens for batch in rows.batches(2)]), batches[0].tokens)
    packed = eval_rows(store, length=5, layout="packed")
    assert torch.cat([batch.tokens for batch in packed.batches(2)]).flatten().tolist() == store.stream(
        *store.token_range("valid"))[:len(packed) * 5].tolist()
    with pytest.raises(IndexError):
        rows[3]


def test_impossible_requests(store: TokenStore, tmp_path: Path):
    good = {"length": 4, "layout": "document", "batch": 4, "seed": 0}
    for wrong, message in (({"layout": "rows"}, "one of document, packed"), ({"length": 0}, "at least 1"),
                           ({"batch": 0}, "at least one row")):
        with pytest.raises(ConfigError, match=message):
            TrainRows(store, **{**good, **wrong})
    with pytest.raises(DataError, match="fewer than one packed row of 1000"):
        TrainRows(store, **{**good, "layout": "packed", "length": 1000})
    rows = TrainRows(store, **good)
    with pytest.raises(ConfigError, match="4 rows cannot be shared equally by 3 ranks"):
        rows.batch(0, 0, 3)
    for arguments in ((-1,), (0, 2, 2), (0, 0, 1, 2, 2)):
        with pytest.raises(ConfigError, match="no such part"):
            rows.batch(*arguments)
    with pytest.raises(DataError, match="numbered 0 to 2"):
        eval_rows(store, length=4, layout="document", documents=[3])
    with pytest.raises(ConfigError, match="limit of 0"):
        eval_rows(store, length=4, layout="document", limit=0)
    (tmp_path / "a.txt").write_text("text")
    prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes", valid=0)
    with pytest.raises(DataError, match="valid split is empty"):
        eval_rows(TokenStore(tmp_path / "out"), length=4, layout="document")


def test_prefetch_gives_the_same_batches_passes_errors_on_and_stops(store: TokenStore):
    rows = TrainRows(store, length=4, layout="packed", batch=4, seed=0)
    with prefetch(rows, range(5), world=2, rank=1, micros=2) as ready:
        for step in range(5):
            for micro in range(2):
                batch = next(ready)
                assert torch.equal(batch.tokens, rows.batch(step, 1, 2, micro, 2).tokens)
        assert list(ready) == []
    with prefetch(rows, [0, -1]) as ready:
        next(ready)
        with pytest.raises(ConfigError, match="step -1"):
            next(ready)
        assert list(ready) == []
    before = threading.active_count()
    ready = prefetch(rows, iter(range(10**9)), depth=2)
    next(ready)
    start = time.monotonic()
    ready.close()
    assert time.monotonic() - start < 5 and threading.active_count() == before
    assert list(ready) == []
