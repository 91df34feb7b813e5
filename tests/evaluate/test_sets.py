"""Named texts: spelling, documents, file kinds, and one clear line for what cannot be read."""
from __future__ import annotations

import json
import lzma
import sys
from types import SimpleNamespace

import pytest

from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import DataError
from tdlm.evaluate.sets import SETS, TextStore, read_set, words_joined

WIKI = """ \n = Bridge of 1 @,@ 000 arches = \n \n The bridge , built in the 1930s , is 2 @.@ 5 km long ( 1 @.@ 6 mi ) .
 It cost $ 5 and 10 % more ; the builders ' plan was " <unk> " . \n \n = = History = = \n \n The height is h
 = 3 m if k = \n 1 . It wasn 't high @-@ rise [ sic ] : Smith 's own " view " . \n \n = Second = \n \n Text <unk> . \n"""
JOINED = ["= Bridge of 1,000 arches =\nThe bridge, built in the 1930s, is 2.5 km long (1.6 mi).\n"
          "It cost $5 and 10% more; the builders' plan was \"<unk>\".\n== History ==\nThe height is h\n= 3 m if k =\n"
          "1. It wasn't high-rise [sic]: Smith's own \"view\".", "= Second =\nText <unk>."]


@pytest.mark.parametrize("spelled,joined", [
    ('He said , " stop ! " and " go " .', 'He said, "stop!" and "go".'),
    ("`` Yes , '' she said", '"Yes," she said'),
    ("do n't , she 'll , it 's", "don't, she'll, it's"),
    ("the ' quoted ' word and the dogs ' tails", "the 'quoted' word and the dogs' tails"),
    ("12 @-@ year @-@ old", "12-year-old"), ("= = = Deep = = =", "=== Deep ==="), ("a = b", "a = b"),
    ("one ... two", "one... two"), ("( £ 3 )", "(£3)"), ("line one \n\n line two", "line one\nline two"), ("", "")])
def test_words_are_joined(spelled, joined):
    assert words_joined(spelled) == joined


def test_the_ptb_spelling_replaces_words_only():
    text = words_joined("<unk> sold N shares N \\/ N of Nestle ?", {"N": "1", "<unk>": "?"})
    assert text == "? sold 1 shares 1 / 1 of Nestle?"


def write(path, text: str):
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["wiki.test.tokens", "wiki.test.tokens.xz", "wiki.test.txt"])
def test_wikitext_is_cut_into_articles_at_headings_alone(tmp_path, name):
    """A line of a formula that begins and ends with = is no heading."""
    texts = read_set(f"wikitext-103={write(tmp_path / name, WIKI)}")
    assert texts.texts == JOINED and texts.unknown == 2 and texts.detokeniser == "words"
    said = texts.to_json()
    assert said["source"] == name and said["documents"] == 2 and len(str(said["fingerprint"])) == 32


def test_wikitext_of_the_hub_is_lines_again(monkeypatch):
    """There every line is a row, and blank ones are empty: headings must still be found, formulas not."""
    rows = [{"text": line if line.isspace() is False and line else ""} for line in WIKI.splitlines(keepends=True)]
    asked = []

    def load(name, config, **options):
        asked.append((name, config, options["split"]))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert read_set("wikitext-103").texts == JOINED
    assert read_set("wikitext-2=hf:some/one:else:validation").texts == JOINED
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", "test"), ("some/one", "else", "validation")]


def test_lambada_is_context_and_continuation(tmp_path):
    rows = [{"context": "a dark and stormy", "continuation": "night"}, {"text": " whole  passage "}]
    path = write(tmp_path / "lambada.test.jsonl.xz", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_set(f"lambada={path}").texts == ["a dark and stormy night", "whole  passage"]
    assert read_set(f"lambada={tmp_path}").texts[0].endswith("night"), "a folder with one file"


def test_lines_and_records(tmp_path):
    lines = write(tmp_path / "ptb.test.txt", " no it was n't black monday \n but <unk> N \n\n")
    assert read_set(f"ptb={lines}").texts == ["no it wasn't black monday", "but ? 1"]
    paper = write(tmp_path / "arxiv.jsonl", json.dumps({"article": "we study @xmath0 .\n it works ."}) + "\n")
    assert read_set(f"arxiv={paper}").texts == ["we study @xmath0.\nit works."]
    news = write(tmp_path / "news.jsonl", json.dumps({"text": "Stocks rose , he said ."}) + "\n")
    assert read_set(f"ag_news={news}").texts == ["Stocks rose , he said ."], "as it is"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"sentence": ["mr. <unk> is chairman", "a second one"]}), tmp_path / "ptb.parquet")
    assert read_set(f"ptb={tmp_path / 'ptb.parquet'}").texts == ["mr. ? is chairman", "a second one"]
    with pytest.raises(DataError, match=r"no field 'text', but 'sentence'$"):
        read_set(f"lm1b={tmp_path / 'ptb.parquet'}")


def test_a_folder_gives_its_test_file(tmp_path):
    write(tmp_path / "wiki.valid.tokens", " \n = Valid = \n \n No . \n")
    write(tmp_path / "wiki.test.tokens", WIKI)
    assert read_set(f"wikitext-2={tmp_path}").texts == JOINED
    write(tmp_path / "other.test.txt", "two")
    with pytest.raises(DataError, match=r"one test file is expected, found 2; name the file: --on wikitext-2=FILE"):
        read_set(f"wikitext-2={tmp_path}")


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    bad = {"a.pdf": "", "b.jsonl": "{", "c.jsonl": '["x"]', "d.jsonl": '{"body": "x"}', "e.txt": " \n ", "f.jsonl": '{"text": 3}'}
    for name, text in bad.items():
        write(tmp_path / name, text)
    for wanted, words in [
            ("wikitext", "no text set 'wikitext'; did you mean 'wikitext-2'"), ("lambada", "cannot be reached or read.*no route"),
            ("ptb", "give it as a file: --on ptb=PATH"), (f"lambada={tmp_path}/none.txt", "no such file"),
            (f"lambada={tmp_path}/a.pdf", "cannot be read; supported are"), (f"lambada={tmp_path}/b.jsonl", "line 1 is no JSON"),
            (f"lambada={tmp_path}/c.jsonl", "line 1 is no object"), (f"lambada={tmp_path}/e.txt", "holds no text"),
            (f"lambada={tmp_path}/d.jsonl", r"line 1 has no text in text or context \+ continuation, but the fields body"),
            (f"lm1b={tmp_path}/f.jsonl", "line 1 has no text in text")]:
        with pytest.raises(DataError, match=words) as caught:
            read_set(wanted)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'tdlm\[data\]'"):
        read_set("ag_news")


def test_every_set_is_complete():
    for name, about in SETS.items():
        assert about.hub is None or (about.hub.count(":") == 2 and "/" in about.hub), name


def test_texts_in_memory_are_a_stream_of_documents():
    tokenizer = Tokenizer.from_bytes()
    path_less = TextStore(SimpleNamespace(name="x", texts=["ab", "c"], fingerprint="f"), tokenizer)  # type: ignore[arg-type]
    assert path_less.stream(0, 5).tolist() == [97, 98, 256, 99, 256] and path_less.token_range("any") == (0, 5)
    assert path_less.starts.tolist() == [0, 3, 5] and path_less.documents("valid") == range(2)
