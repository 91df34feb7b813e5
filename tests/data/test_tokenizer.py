"""Ids are a function of the text, bytes are counted exactly, and PAD/EOS/BOS never come out of a text."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.data.tokenizer import Tokenizer, train_bpe
from tdlm.errors import TokenizerError

GPT2 = Path(__file__).parents[1] / "fixtures" / "gpt2.tokenizer.json.xz"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["<|endoftext|>", "a<|pad|>b", " Hello  world\r\n", "é€😀", "\x00\ufeff", "don't 12345"])
gpt2 = Tokenizer.load(GPT2)
own = train_bpe(["the cat sat on the mat. the dog sat on the log."] * 3, 280)
raw = Tokenizer.from_bytes()


def test_gpt2_has_pad_behind_its_last_id():
    assert (gpt2.size, gpt2.pad_id, gpt2.eos_id, gpt2.bos_id) == (50258, 50257, 50256, 50256)
    assert gpt2.dtype == np.uint16
    assert gpt2.encode("Hello world").tolist() == [15496, 995]


@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
@pytest.mark.parametrize("tokenizer", [gpt2, own, raw], ids=["gpt2", "bpe", "bytes"])
def test_round_trip_and_exact_bytes(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode_batch(["before", text])[1]
    assert ids.dtype == tokenizer.dtype
    assert tokenizer.decode(ids) == text
    assert tokenizer.exact_bytes
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
    assert not set(ids.tolist()) & {tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id}


@settings(deadline=None, max_examples=40)
@given(text=TEXTS)
def test_bytes_shortcut_is_what_the_library_does(text: str):
    backend = tokenizers.Tokenizer.from_str(raw.to_json())
    backend.encode_special_tokens = True
    assert raw.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids


def test_decode_leaves_marks_out_and_replaces_broken_bytes():
    ids = [gpt2.bos_id, *gpt2.encode("é").tolist(), gpt2.eos_id, gpt2.pad_id]
    assert gpt2.decode(ids) == "é"
    assert raw.decode([0xC3, 0x41]) == "\ufffdA"
    assert raw.piece(0xC3) == "\\xc3" and raw.piece(0x41) == "A"
    assert gpt2.piece(995) == " world" and gpt2.piece(gpt2.pad_id) == "<|pad|>"
    assert gpt2.token_bytes[[gpt2.pad_id, gpt2.eos_id]].tolist() == [0, 0]
    with pytest.raises(TokenizerError, match="from 0 to"):
        gpt2.piece(50258)


@pytest.mark.parametrize("tokenizer", [gpt2, own, raw], ids=["gpt2", "bpe", "bytes"])
def test_saving_keeps_everything(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path)
    assert (again.hash, again.size, again.pad_id, again.eos_id, again.bos_id) == (
        tokenizer.hash, tokenizer.size, tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # other tools can use the file
    assert backend.encode("the cat").ids == tokenizer.encode("the cat").tolist()
    backend.save(str(tmp_path / "library.json"))  # and may write it in their own way
    assert Tokenizer.load(tmp_path / "library.json").hash == tokenizer.hash


def test_named_marks_are_kept_and_change_the_hash(tmp_path: Path):
    other = Tokenizer.load(GPT2, eos="!", bos="", pad="<fill>")
    assert (other.eos_id, other.bos_id, other.pad_id) == (0, None, 50257)
    assert other.hash != gpt2.hash
    other.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path)
    assert (again.hash, again.eos_id, again.bos_id, again.pad_id) == (other.hash, 0, None, 50257)
    tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="no token of this tokenizer"):
        Tokenizer.load(GPT2, eos="<nowhere>")
    with pytest.raises(TokenizerError, match="token of its own"):
        Tokenizer.load(GPT2, pad="<|endoftext|>")


def _word_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    backend.enable_padding(length=9)
    backend.enable_truncation(2)
    return Tokenizer(json.loads(backend.to_str()))


def test_marks_in_a_text_stay_out_even_where_the_model_knows_them_as_words():
    words = _word_tokenizer()
    assert (words.size, words.pad_id, words.bos_id, words.eos_id) == (6, 0, 1, 2)
    assert words.encode("a <pad> b </s> a c").tolist() == [4, 5, 4, 3]  # neither padded nor truncated
    assert not words.exact_bytes


def test_ids_with_gaps_keep_pad_where_it_was(tmp_path: Path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    first = Tokenizer(json.loads(backend.to_str()))
    assert (first.size, first.pad_id, first.eos_id) == (9, 8, None)
    first.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path)
    assert (again.pad_id, again.hash) == (8, first.hash)
    assert again.piece(3) == ""


def test_training_is_deterministic_and_learns():
    texts = ["low lower lowest", "new newer newest", "wide wider widest"] * 5
    first, second = train_bpe(texts, 300), train_bpe(iter(texts), 300)
    assert first.hash == second.hash
    assert 258 < first.size <= 300
    assert (first.eos_id, first.pad_id) == (first.size - 2, first.size - 1)
    assert len(first.encode("lowest newest")) < 8
    with pytest.raises(TokenizerError, match="at least 258"):
        train_bpe(texts, 100)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("missing.json", None, "tokenizer.json or the name 'bytes'"),
    ("broken.json", b"{", "cannot be read"),
    ("broken.json.xz", b"no xz", "cannot be read"),
    ("list.json", b"[]", "is expected"),
    ("vocab.json", b'{"a": 0}', "is expected"),
    ("odd.json", b'{"model": {"type": "Nothing"}}', "cannot use"),
    ("empty.json", b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}', "at least one token"),
])
def test_unusable_files(tmp_path: Path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)
