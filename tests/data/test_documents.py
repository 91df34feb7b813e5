"""Every way to give text gives the same documents, from any position on; every damaged file is named with its place."""
from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.data.documents import Documents, Position, cut, documents
from tdlm.errors import DataError

TEXT = "Grüße, 世界!\nsecond line\r\n\nend"
RECORDS = [{"text": "one"}, {"title": "T", "text": "two\nlines"}, {"text": ""}, {"text": " \n"}, {"text": "last é"}]
EXPECTED = ["one", "T\n\ntwo\nlines", "last é"]


def _zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zstd}


def texts(*inputs: str | Path, **kwargs) -> list[str]:
    return [document.text for document in documents(inputs, **kwargs)]


def lines(records: list) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


@pytest.mark.parametrize("end", COMPRESS)
def test_compressed_files_in_one_and_in_two_parts(tmp_path: Path, end: str):
    pack = COMPRESS[end]
    half = len(TEXT.encode()) // 2
    (tmp_path / f"one.txt{end}").write_bytes(pack(TEXT.encode()))
    (tmp_path / f"two parts.txt{end}").write_bytes(pack(TEXT.encode()[:half]) + pack(TEXT.encode()[half:]))
    (tmp_path / f"rows.jsonl{end}").write_bytes(pack(lines(RECORDS[:2])) + pack(lines(RECORDS[2:])))
    assert texts(tmp_path / f"one.txt{end}", tmp_path / f"two parts.txt{end}") == [TEXT, TEXT]
    assert texts(tmp_path / f"rows.jsonl{end}") == EXPECTED


def _parquet(path: Path, records: list, group: int = 2) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    table = pyarrow.Table.from_pylist(records, schema=pyarrow.schema([("title", "string"), ("text", "string"),
                                                                       ("other", "int64")]))
    parquet.write_table(table, path, row_group_size=group)


def test_parquet_is_read_by_row_groups_from_any_row(tmp_path: Path):
    _parquet(tmp_path / "rows.parquet", RECORDS)
    assert texts(tmp_path / "rows.parquet") == EXPECTED
    reader = Documents([tmp_path / "rows.parquet"], after=Position(0, 0, 0))
    assert [(document.text, document.position.record, document.empty) for document in reader] == [
        (EXPECTED[1], 1, 0), (EXPECTED[2], 4, 2)]
    assert reader.empty == 2
    with pytest.raises(DataError, match="no field 'body', but 'title', 'text', 'other'"):
        texts(tmp_path / "rows.parquet", text_field="body")
    _parquet(tmp_path / "bad.parquet", [{"other": 3, "text": "x"}])
    with pytest.raises(DataError, match="row 1: field 'other' should be a text, got 3"):
        texts(tmp_path / "bad.parquet", text_field="other")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"no\.parquet: damaged"):
        texts(tmp_path / "no.parquet")


def test_a_folder_is_its_supported_files_sorted(tmp_path: Path):
    folder = tmp_path / "with spaces"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.jsonl", "sub/c.txt", "ignored.bin", ".hidden.txt"):
        (folder / name).write_text(json.dumps({"text": name}))
    assert texts(folder) == ["a.jsonl", '{"text": "b.txt"}', '{"text": "sub/c.txt"}']


def test_fields_marks_and_blank_lines(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines([{"body": "x", "title": "T"}]) + b"\n" + lines([{"body": None}]))
    reader = Documents([file], text_field="body", title_field=None)
    assert [document.text for document in reader] == ["x"]
    assert reader.empty == 1
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "nothing.txt").write_bytes(b"")
    reader = Documents([tmp_path / "nothing.txt", tmp_path / "mark.txt"])
    assert [(document.text, document.empty) for document in reader] == [("hello", 1)]


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.sampled_from("ab \n€😀"), max_size=120), limit=st.integers(8, 30))
def test_cutting_keeps_every_byte_and_every_character(text: str, limit: int):
    data = text.encode()
    pieces = list(cut(data, limit))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= limit for piece in pieces) or not data
    assert all(len(piece) >= limit // 2 - 3 for piece in pieces[:-1])
    for piece in pieces:
        piece.decode()  # no character is cut in two


@settings(deadline=None, max_examples=60)
@given(texts_=st.lists(st.text(st.sampled_from("ab \n€"), max_size=50), max_size=8), limit=st.integers(8, 24),
       data=st.data())
def test_reading_goes_on_behind_any_document(tmp_path_factory, texts_: list[str], limit: int, data: st.DataObject):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "a.jsonl").write_bytes(lines([{"text": text} for text in texts_]))
    (folder / "b.txt").write_text("".join(texts_), newline="")
    (folder / "c.txt.gz").write_bytes(gzip.compress(" \n".join(texts_).encode()))
    whole = Documents([folder], limit=limit)
    every = list(whole)
    if not every:
        return
    number = data.draw(st.integers(0, len(every) - 1))
    rest = Documents([folder], limit=limit, after=every[number].position)
    assert list(rest) == every[number + 1:]
    assert rest.empty == whole.empty - sum(document.empty for document in every[:number + 1])


@pytest.mark.parametrize(("text", "pieces"), [
    ("aa bb\ncc dd", ["aa bb\n", "cc dd"]),  # behind a line end, though a space comes later
    ("aaaaa bbbb cc", ["aaaaa", " bbbb cc"]),  # before a space: byte-level BPE glues it to the word behind
    ("aaaaa bb cc", ["aaaaa bb", " cc"]),
    ("aa bbbbbbbbb", ["aa bbbbb", "bbbb"]),  # a space in the first half would leave a scrap
    ("aaaaaaa€a", ["aaaaaaa", "€a"]),
])
def test_where_a_document_is_cut(text: str, pieces: list[str]):
    assert [piece.decode() for piece in cut(text.encode(), 8)] == pieces


def test_a_long_line_is_cut_without_being_held(tmp_path: Path):
    file = tmp_path / "line.txt.gz"
    file.write_bytes(gzip.compress(b"x" * 3_000_000))
    sizes = [document.size for document in documents([file], limit=4096)]
    assert sum(sizes) == 3_000_000 and max(sizes) == 4096


def test_invalid_utf8_is_named_by_line_and_byte_even_far_inside(tmp_path: Path):
    file = tmp_path / "latin.txt"
    good = b"line of text\n" * 1000
    file.write_bytes(good + b"caf\xe9 noir\n")
    with pytest.raises(DataError, match=rf"latin\.txt: not UTF-8 at line 1001, byte {len(good) + 3} "):
        texts(file, limit=512)
    assert texts(file, errors="replace")[0].endswith("caf\ufffd noir\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(lines([{"text": "fine"}]) + b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: not UTF-8 at line 2, byte "):
        texts(rows)
    rows.write_bytes(b'{"text": "half \\ud83d"}\n')
    with pytest.raises(DataError, match=r"line 1: .*surrogate"):
        texts(rows)
    assert texts(rows, errors="replace") == ["half \ufffd"]


@pytest.mark.parametrize(("line", "message"), [
    (b'{"text": "a', "line 2 is no JSON"), (b"[1]", "line 2: an object"), (b'{"body": 1}', "line 2: no field 'text', "),
    (b'{"text": 3}', "line 2: field 'text' should be a text, got 3"), (b"[" * 100_000, "line 2 is no JSON"),
])
def test_broken_records_are_named(tmp_path: Path, line: bytes, message: str):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines([{"text": "fine"}]) + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        texts(file)
    assert "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("end", [end for end in COMPRESS if end])
def test_cut_off_and_damaged_compressed_files(tmp_path: Path, end: str):
    data = COMPRESS[end](b"".join(b"%d squared is %d\n" % (n, n * n) for n in range(50_000)))
    file = tmp_path / f"text.txt{end}"
    file.write_bytes(data[:len(data) * 2 // 3])
    with pytest.raises(DataError, match=f"text.txt{end}: the compressed file is cut off behind byte"):
        texts(file, limit=1 << 14)
    file.write_bytes(b"this is not compressed at all")
    with pytest.raises(DataError, match="damaged or not of the kind"):
        texts(file)


def test_what_cannot_be_an_input(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"x")
    for given_, message in ((tmp_path / "no.txt", "no such file"),
                            (tmp_path / "image.png", "cannot be read; supported"),
                            (tmp_path / "empty", "no file that can be read"), ("hf:nothing", "hf:OWNER/NAME")):
        with pytest.raises(DataError, match=message):
            texts(given_)
    with pytest.raises(DataError, match="at least one input"):
        documents([])


class _Rows(list):
    def skip(self, count: int) -> list:
        return self[count:]


def test_hub_datasets_and_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "some/thing":
            raise ConnectionError("no network\nand a long story")
        return _Rows(RECORDS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert texts("hf:a/b", "a/b:c:validation") == EXPECTED * 2
    assert texts("openwebtext", after=Position(0, 1, 0)) == EXPECTED[2:]
    assert asked == [("a/b", None, "train", True), ("a/b", "c", "validation", True),
                     ("Skylion007/openwebtext", None, "train", True)]
    with pytest.raises(DataError, match=r"^hf:some/thing: cannot be reached .*no network\)") as caught:
        texts("some/thing")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'tdlm\[data\]'"):
        texts("hf:a/b")
