"""The choices of `tdlm tree build`: exchange, what counts as a neighbour, and trees from a run's own rows."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdlm.cli import main
from tdlm.data.store import TokenStore
from tdlm.errors import ConfigError, TokenizerError, TreeError
from tdlm.train.run import open_run
from tdlm.tree.cooccurrence import neighbour_vectors
from tdlm.tree.embeddings import from_corpus
from tdlm.tree.mass import capped
from tdlm.tree.tree import Tree
from tdlm.verbs.tree import build_from, of_run
from tests.tree.test_exchange import chain

SMALL = ("--steps", "2", "--batch", "2", "--set", "backbone.blocks=1", "--set", "backbone.heads=2", "--set", "backbone.width=16",
         "--set", "data.length=16", "--device", "cpu")


def tdlm(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    assert not leaving.value.code, arguments


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of a text whose 64 letters stand in 8 planted classes, a tree of it, and runs: tied, shared, flat."""
    place = tmp_path_factory.mktemp("world")
    text, _ = chain(8, 8, 30_000, seed=3)
    lines = ["".join(chr(59 + token) for token in part) for part in np.split(text, 30)]
    (place / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    tdlm("prepare", place / "text.jsonl", "--out", place / "data", "--tokenizer", "bytes", "--valid", "1")
    tdlm("tree", "build", "--data", place / "data", "--out", place / "tree", "--branching", "20", "--method", "exchange")
    tdlm("train", "small", "--data", place / "data", "--tree", place / "tree", "--out", place / "run", *SMALL)
    tdlm("train", "mdlm-small", "--data", place / "data", "--out", place / "flat", *SMALL)
    return place


def build(world: Path, **options: Any) -> Tree:
    return build_from(data=world / "data", branching=20, say=lambda line: None, **options)[0]


def test_exchange_on_the_command_line(world: Path):
    tree, store = Tree.load(world / "tree"), TokenStore(world / "data")
    assert tree.to_bytes() == build(world, method="exchange").to_bytes(), "the same request, the same bytes"
    assert tree.meta["method"] == "exchange" and tree.meta["exchange"]["window"] == 2 and tree.meta["vectors"]["window"] == 4
    assert tree.tokenizer_hash == store.tokenizer.hash
    plain, wider = build(world), build(world, method="exchange", window=3)
    assert wider.meta["exchange"]["window"] == 3 and "exchange" not in plain.meta
    assert len({tree.to_bytes() for tree in (tree, plain, wider)}) == 3


@pytest.mark.parametrize("method", ["kmeans", "exchange"])
def test_a_bound_on_the_share_of_the_text(world: Path, method: str):
    counts = TokenStore(world / "data").counts
    free, bound = build(world, method=method), build(world, method=method, max_mass=2.0)
    weight, most = capped(counts, 20, 2.0)
    assert np.bincount(bound.slot[1], weight).max() <= most < np.bincount(build(world).slot[1], weight).max()
    assert bound.meta["bounds"]["max_mass"] == 2.0 and bound.to_bytes() != free.to_bytes()
    bound.check()


def test_what_counts_as_a_neighbour(world: Path):
    trees = [build(world), *(build(world, **options) for options in ({"window": 1}, {"contexts": 16}, {"sides": "pooled"}))]
    found = [{name: tree.meta["vectors"][name] for name in ("window", "contexts", "sides")} for tree in trees]
    assert found[0] == {"window": 4, "contexts": 4096, "sides": "apart"}
    assert [found[1]["window"], found[2]["contexts"], found[3]["sides"]] == [1, 16, "pooled"]
    assert len({tree.ancestor.numpy().tobytes() for tree in trees}) == 4, "each choice changes the tree"


def test_pooled_sides_do_not_tell_left_from_right():
    """0 stands before 2 to 9, and 1 behind them: the same neighbours, on different sides."""
    documents = [np.array([0, near]) for near in range(2, 10)] + [np.array([near, 1]) for near in range(2, 10)]
    documents += [np.array([10, 11])] * 20
    for sides, same in (("pooled", True), ("apart", False)):
        rows = from_corpus(documents, 12, sides=sides, dimensions=4).rows
        assert rows[:2].any(1).all() and np.allclose(rows[0], rows[1], atol=1e-3) == same
    with pytest.raises(TreeError, match="kept apart or pooled, got 'left'"):
        from_corpus(documents, 12, sides="left")


def test_a_wide_window_fits_and_too_many_tokens_are_refused():
    """Window 8 counts in units of 1/840: five million tokens of 50,258 kinds, one in twenty the same, must fit into words."""
    documents = [np.arange(200) % 7, np.arange(100) % 5]
    counts = np.bincount(np.concatenate(documents), minlength=50_258)
    many = counts.copy()
    many[0] = 250_000  # an upper bound is all that the counts are used for besides the choice of contexts
    assert np.array_equal(neighbour_vectors(documents, many, window=8, contexts=4096),
                          neighbour_vectors(documents, counts, window=8, contexts=4096))
    many[0] = 1 << 60
    with pytest.raises(TreeError, match="with window 8 do not fit; use a smaller window or fewer tokens"):
        neighbour_vectors(documents, many, window=8)


def test_a_tree_from_a_run(world: Path):
    store = TokenStore(world / "data")
    run = open_run(world / "run")
    embedding = run.assembly.model.backbone.embedding.weight.detach().numpy()[: store.size]
    vectors = of_run(world / "run", store.tokenizer, metric="euclidean")
    assert np.array_equal(vectors.rows, embedding)
    assert vectors.source["tensor"] == "backbone.embedding.weight" and vectors.source["step"] == 2
    seen = of_run(world / "run", store.tokenizer, store.counts, "euclidean").rows
    assert np.array_equal(seen.any(1), store.counts > 0) and np.array_equal(seen[store.counts > 0], embedding[store.counts > 0])
    flat = of_run(world / "flat", store.tokenizer, metric="euclidean")
    head = dict(open_run(world / "flat").assembly.model.named_parameters())[flat.source["tensor"]]
    assert flat.source["tensor"].startswith("predictor.") and np.array_equal(flat.rows, head.detach().numpy())
    named = of_run(world / "flat", store.tokenizer, metric="euclidean", tensor="backbone.embedding.weight")
    assert not np.array_equal(named.rows, flat.rows)
    one, two = (build(world, vectors=str(world / "run")) for _ in range(2))
    assert one.to_bytes() == two.to_bytes() and one.meta["vectors"]["kind"] == "run"
    assert str(world) not in json.dumps(one.meta)
    both = build(world, vectors=str(world / "run"), method="exchange")
    assert both.meta["vectors"]["kind"] == "run" and both.to_bytes() != one.to_bytes()


def test_what_is_refused(world: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="exchange looks at the neighbours of tokens in text: give --data DIR"):
        build_from(tokenizer="bytes", method="exchange", vectors=str(world / "run"), branching=20, say=print)
    for options in ({"window": 2}, {"contexts": 7}, {"sides": "pooled"}):
        for others in ({"method": "random"}, {"vectors": str(world / "run")},
                       *([] if "window" in options else [{"vectors": str(world / "run"), "method": "exchange"}])):
            with pytest.raises(ConfigError, match=f"--{next(iter(options))} is about vectors from the corpus"):
                build(world, **others, **options)
    for method in ("kmeans", "exchange"):
        with pytest.raises(ConfigError, match="neighbours stand 1 to 1024 places away, got --window 0"):
            build(world, method=method, window=0)
    with pytest.raises(TreeError, match=r"no tensor gone with a row a token; choose one of backbone\.embedding"):
        build(world, vectors=str(world / "run"), tensor="gone")
    tdlm("prepare", world / "text.jsonl", "--out", tmp_path / "other", "--tokenizer", "bpe:262", "--valid", "1")
    with pytest.raises(TokenizerError, match="its rows belong to other tokens"):
        build_from(data=tmp_path / "other", branching=20, vectors=str(world / "run"), say=print)
