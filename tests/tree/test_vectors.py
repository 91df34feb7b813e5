"""Where token vectors come from: files, checkpoints, the corpus; and what is said when they do not fit."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tdlm.errors import TreeError
from tdlm.tree.build import build_tree
from tdlm.tree.cooccurrence import count_tokens, neighbour_vectors
from tdlm.tree.embeddings import from_array, from_checkpoint, from_corpus, from_store

GPT2 = Path(__file__).parents[1] / "fixtures" / "gpt2-vocab-embed64.npz"
ROWS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def test_gpt2s_table():
    vectors = from_array(GPT2, 50_258)
    assert vectors.rows.shape == (50_258, 64) and vectors.rows.dtype == np.float32
    assert (vectors.source["kind"], vectors.source["rows"], vectors.source["file"]) == ("array", 50_257, GPT2.name)
    with np.load(GPT2) as file:
        assert np.array_equal(vectors.rows[262], file["q"][262] * file["scale"])
    without = np.flatnonzero(~vectors.rows.any(1))
    assert len(without) == 22 and without[-1] == 50_257, "PAD, and 21 tokens for bytes that no text has"


@pytest.mark.parametrize("name, write", [
    ("a.npy", lambda path: np.save(path, ROWS)), ("a.npz", lambda path: np.savez(path, wte=ROWS, names=np.arange(3))),
    ("half.npy", lambda path: np.save(path, ROWS.astype(np.float16))),
    ("a.safetensors", lambda path: save_file({"anything": torch.from_numpy(ROWS)}, path))])
def test_an_array_in_a_file(tmp_path: Path, name: str, write: Callable[[Path], None]):
    write(tmp_path / name)
    vectors = from_array(tmp_path / name, 41)
    assert np.allclose(vectors.rows[:40], ROWS, atol=1e-2 if "half" in name else 0) and not vectors.rows[40].any()
    assert vectors.source["file"] == name and str(tmp_path) not in json.dumps(vectors.source)


@pytest.mark.parametrize("size, known", [(39, 39), (40, 39), (41, 40)])
def test_mask_is_not_taken_for_pad(tmp_path: Path, size: int, known: int):
    """MDLM: MASK's row stands right behind the tokens', where PAD is in our vocabulary. GIDD (39) has PAD's row before it."""
    for name, tensor in (("mdlm", "backbone.vocab_embed.embedding"), ("gidd", "vocab_embed.embedding")):
        save_file({tensor: torch.from_numpy(ROWS)}, tmp_path / f"{name}.safetensors")
        rows = from_checkpoint(tmp_path / f"{name}.safetensors", size).rows
        assert np.array_equal(rows[:known], ROWS[:known]) and not rows[known:].any()
    save_file({"wte.weight": torch.from_numpy(ROWS)}, tmp_path / "gpt2.safetensors")
    assert np.array_equal(from_checkpoint(tmp_path / "gpt2.safetensors", 40).rows, ROWS), "all of them are tokens'"


def test_eight_bit_columns_and_cluster_centres(tmp_path: Path):
    q, scale = np.array([[1, -2], [3, 4], [0, 5], [0, 5]] * 3, dtype=np.int8), np.array([0.5, 2.0], dtype=np.float32)
    np.savez(tmp_path / "q.npz", q=q, scale=scale, exact=np.arange(12) % 4 < 2)
    rows = from_array(tmp_path / "q.npz", 12).rows
    assert rows[0].tolist() == [0.5, -4] and not rows[2].any(), "the inexact row that is repeated had no vector"
    np.savez(tmp_path / "c.npz", centroid=ROWS[:3], cluster=np.arange(12) % 3)
    vectors = from_array(tmp_path / "c.npz", 12)
    assert np.array_equal(vectors.rows, ROWS[np.arange(12) % 3]) and vectors.source["kind"] == "cluster centres"


def test_cosine_and_euclidean(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.r_[ROWS, np.zeros((1, 6), np.float32)])
    unit = from_array(tmp_path / "a.npy", 41, metric="cosine").rows
    assert np.allclose(np.linalg.norm(unit[:40], axis=1), 1) and not unit[40].any()
    assert np.allclose(unit[:40] * np.linalg.norm(ROWS, axis=1, keepdims=True), ROWS, atol=1e-5)
    with pytest.raises(TreeError, match="unknown metric 'manhattan'; choose cosine or euclidean"):
        from_array(tmp_path / "a.npy", 41, metric="manhattan")  # pyright: ignore[reportArgumentType]


def test_spare_rows_are_dropped_and_other_vocabularies_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.tile(ROWS, (5, 1)))
    assert from_array(tmp_path / "a.npy", 190).rows.shape == (190, 6)
    for size in (100_000, 300):
        with pytest.raises(TreeError, match=f"200 token vectors for a vocabulary of {size}; .* another tokenizer"):
            from_array(tmp_path / "a.npy", size)


def damaged(name: str, content: bytes) -> tuple[str, Callable[[Path], Any]]:
    return name, lambda path: path.write_bytes(content)


@pytest.mark.parametrize("name, write, says", [
    ("gone.npy", lambda path: None, "no embedding file"),
    ("a.csv", lambda path: path.write_text("1,2"), "read from .npy, .npz or .safetensors"),
    (*damaged("a.npy", b"abc"), "cannot be read as token vectors"), (*damaged("empty.npy", b""), "cannot be read"),
    (*damaged("a.npz", b"PK\x03\x04 and no zip"), "cannot be read"), (*damaged("a.safetensors", b"xyz"), "cannot be read"),
    ("object.npy", lambda path: np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True), "cannot be read"),
    ("text.npy", lambda path: np.save(path, np.array([["a", "b"]])), "must be numbers"),
    ("flat.npy", lambda path: np.save(path, ROWS[0]), "must be a matrix"),
    ("two.npz", lambda path: np.savez(path, a=ROWS, b=ROWS), r"holds 2 matrices \(a, b\)"),
    ("none.npz", lambda path: np.savez(path, a=ROWS[0]), "holds 0 matrices"),
    ("far.npz", lambda path: np.savez(path, centroid=ROWS[:2], cluster=np.arange(40)), "cannot be read"),
    ("wide.npz", lambda path: np.savez(path, q=ROWS.astype(np.int8), scale=ROWS[0, :4]), "cannot be read"),
    ("nan.npy", lambda path: np.save(path, np.where(np.arange(40)[:, None] == 3, np.nan, ROWS)), "token 3 is not finite")])
def test_files_that_cannot_be_used(tmp_path: Path, name: str, write: Callable[[Path], None], says: str):
    write(tmp_path / name)
    with pytest.raises(TreeError, match=says):
        from_array(tmp_path / name, 40)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "wte.weight", "model.embed_tokens.weight", "shared.weight",
                                  "bert.embeddings.word_embeddings.weight", "gpt_neox.embed_in.weight", "tok_embeddings.weight",
                                  "backbone.vocab_embed.embedding"])
def test_the_input_embedding_of_a_checkpoint_by_its_usual_name(tmp_path: Path, name: str):
    other = {"lm_head.out": torch.zeros(40, 6), "h.0.weight": torch.ones(6, 6), "bias": torch.zeros(40)}
    save_file({**other, name: torch.from_numpy(ROWS).bfloat16()}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        vectors = from_checkpoint(path, 41)
        assert np.allclose(vectors.rows[:40], ROWS, atol=0.02) and vectors.source["tensor"] == name
        assert vectors.source["name"] == path.name and str(tmp_path.parent) not in json.dumps(vectors.source)


def test_a_checkpoint_in_parts_and_a_tensor_by_name(tmp_path: Path):
    save_file({"a.weight": torch.zeros(40, 6)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.from_numpy(ROWS), "small": torch.zeros(2, 2)}, tmp_path / "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}))
    assert np.array_equal(from_checkpoint(tmp_path, 40, tensor="b.weight").rows, ROWS)
    with pytest.raises(TreeError, match=r"no tensor with a usual name .* --tensor, for example a\.weight, b\.weight"):
        from_checkpoint(tmp_path, 40)
    with pytest.raises(TreeError, match=r"no tensor c\.weight in the checkpoint"):
        from_checkpoint(tmp_path, 40, tensor="c.weight")
    for content in ("{", "{}", "[]", json.dumps({"weight_map": {"a": "gone.safetensors"}})):
        index.write_text(content)
        with pytest.raises(TreeError, match=r"cannot be read"):
            from_checkpoint(tmp_path, 40)


def test_checkpoints_that_are_none(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(TreeError, match="pickled checkpoints are not opened"):
        from_checkpoint(tmp_path, 40)
    with pytest.raises(TreeError, match="pickled checkpoints are not opened"):
        from_checkpoint(tmp_path / "pytorch_model.bin", 40)
    (tmp_path / "bad.safetensors").write_bytes(b"123")
    with pytest.raises(TreeError, match=r"bad\.safetensors cannot be read as safetensors"):
        from_checkpoint(tmp_path / "bad.safetensors", 40)
    with pytest.raises(TreeError, match=r"no checkpoint .*gone; give a \.safetensors file, a folder"):
        from_checkpoint(tmp_path / "gone", 40)
    save_file({"x": torch.zeros(3)}, tmp_path / "flat.safetensors")
    with pytest.raises(TreeError, match="it holds no matrix"):
        from_checkpoint(tmp_path / "flat.safetensors", 40)


def two_classes(lines: int, seed: int = 0, classes: int = 2, members: int = 8) -> list[np.ndarray]:
    """Texts in which any word of one class is followed by any of the next: words of a class are interchangeable."""
    draw = np.random.default_rng(seed)
    turn = np.arange(20) % classes
    return [turn * members + draw.integers(0, members, 20) for _ in range(lines)]


@pytest.mark.parametrize("classes, branching", [(2, 2), (2, 4), (3, 6)])
def test_interchangeable_words_become_siblings(classes: int, branching: int):
    size = 8 * classes
    tree = build_tree(from_corpus(two_classes(400, classes=classes), size, dimensions=8), branching=branching, size=size)
    top = tree.ancestor[tree.height - 1].numpy()
    assert len(np.unique(top)) == branching
    for node in np.unique(top):
        assert len(np.unique(np.flatnonzero(top == node) // 8)) == 1, "no cluster mixes two classes"


def test_neighbours_counted_by_hand():
    """a b a c: offsets 1 and 2 count 1 and 1/2; the context to the right and to the left are kept apart."""
    texts = [np.array([0, 1, 0, 2]), np.array([2])]
    assert count_tokens(texts, 4).tolist() == [2, 1, 2, 0]
    found = neighbour_vectors(texts, count_tokens(texts, 4), contexts=4, window=2, dimensions=6, damping=1.0)
    right = np.array([[0.5, 1, 1], [1, 0, 0.5], [0, 0, 0]])  # n(x, c): c stands right of x
    columns = []
    for counts in (right, right.T):
        chance = counts.sum(0) ** 0.75 / (counts.sum(0) ** 0.75).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            columns.append(np.nan_to_num(np.maximum(np.log(counts / counts.sum(1, keepdims=True) / chance), 0), posinf=0))
    expected = np.concatenate(columns, axis=1)
    assert np.allclose(found[:3] @ found[:3].T, expected @ expected.T, atol=1e-4)
    assert not found[3].any(), "a token that never occurs has no vector"


def test_cooccurrence_is_deterministic_and_repeats_nothing():
    texts = two_classes(60)
    first, again = from_corpus(texts, 17), from_corpus(texts, 17)
    assert np.array_equal(first.rows, again.rows) and not first.rows[16].any()
    assert first.source["kind"] == "corpus" and first.source["tokens"] == 1200
    joined = [np.concatenate([np.append(text, 16) for text in texts])]
    with pytest.raises(TreeError, match="read twice"):
        from_corpus(iter(texts), 17)
    with pytest.raises(TreeError, match="token 16 in the corpus, but the vocabulary has 16"):
        from_corpus(joined, 16)
    for nothing in ([], [np.zeros(0, dtype=np.int64)]):
        with pytest.raises(TreeError, match="no tokens to learn neighbours from"):
            from_corpus(nothing, 17)


def prepared(texts: list[np.ndarray], eos_id: int | None) -> Any:
    """What a prepared folder offers."""
    counts = count_tokens(texts, 18)
    if eos_id is not None:
        counts[eos_id] += len(texts)
    return SimpleNamespace(eos_id=eos_id, counts=counts, documents=lambda split: range(len(texts)),
                           document=lambda number: texts[number].astype(np.uint16))


def test_a_prepared_folder_and_its_limit():
    texts = two_classes(200)
    with_ends = from_store(prepared(texts, 17))
    assert with_ends.source["tokens"] == 200 * 21 and with_ends.rows[17].any() and not with_ends.rows[16].any()
    thinned = from_store(prepared(texts, 17), limit=2100)
    assert thinned.source["tokens"] == 2100
    with_out = from_store(prepared(texts, None))
    assert np.array_equal(with_out.rows, from_corpus(texts, 18).rows)
