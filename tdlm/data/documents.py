"""Documents one after another from files and hub datasets, in bounded memory and from any position on.

A text file is one document, a line of a .jsonl file, a row of a .parquet file or of a hub dataset too. A document of
more than `limit` bytes of UTF-8 is cut into consecutive ones - behind a line end, else before a space, else between two
characters, always in the second half of the limit - so that one endless line needs no more memory than a short one.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from .sources import ByteStream, Source, resolve

LIMIT = 256 * 1024
RECORD_LIMIT = 256 * 1024 * 1024  # a line of a .jsonl file is parsed as a whole
_MARK = b"\xef\xbb\xbf"  # the byte order mark that some editors put first


class Position(NamedTuple):
    """Where a document stands: source, record (line, row) of that source, piece of that record; all from 0."""
    source: int
    record: int
    piece: int


@dataclass(frozen=True)
class Document:
    text: str
    size: int  # bytes of UTF-8
    position: Position
    empty: int  # empty documents passed over between the document before and this one


def _cut(data: bytes | memoryview, limit: int) -> int:
    """Where to cut `data`, which is longer than `limit`."""
    window = bytes(data[:limit + 1])
    half = limit // 2
    if (line := window.rfind(b"\n", half, limit)) >= 0:
        return line + 1
    if (space := window.rfind(b" ", half)) > 0:
        return space
    place = limit
    while place > 0 and data[place] & 0xC0 == 0x80:  # not between the bytes of one character
        place -= 1
    return place or limit


def cut(data: bytes, limit: int) -> Iterator[bytes]:
    """Consecutive pieces of at most `limit` bytes; together they are `data`."""
    view = memoryview(data)
    while len(view) > limit:
        place = _cut(view, limit)
        yield bytes(view[:place])
        view = view[place:]
    yield bytes(view)


class Documents:
    """An iterable over the documents of some inputs. `empty` counts the empty documents passed over so far."""

    def __init__(self, inputs: Sequence[str | Path | Source], *, text_field: str = "text",
                 title_field: str | None = "title", limit: int = LIMIT, errors: str = "strict",
                 after: Position | None = None) -> None:
        """`after`: begin behind the document at this position. `errors`: what invalid UTF-8 is, `strict` (an error) or
        `replace` (it becomes U+FFFD)."""
        if limit < 8:
            raise DataError(f"the limit of a document must be at least 8 bytes, got {limit}")
        if errors not in ("strict", "replace"):
            raise DataError(f"invalid UTF-8 is handled by 'strict' or 'replace', not by {errors!r}")
        self.sources = resolve(inputs)
        self.text_field, self.title_field, self.limit, self.errors = text_field, title_field, limit, errors
        self.after = after
        self.empty = 0
        self._stream: ByteStream | None = None
        self._done = 0

    def bytes_read(self) -> int:
        """How much of `bytes_total` was read, in bytes of the files as they are (hub datasets count nothing)."""
        return self._done + (self._stream.raw_position() if self._stream else 0)

    @property
    def bytes_total(self) -> int:
        return sum(source.size for source in self.sources)

    def __iter__(self) -> Iterator[Document]:
        first, empty = self.after or Position(0, -1, -1), 0
        self.empty = 0
        for number, source in enumerate(self.sources):
            self._done = sum(one.size for one in self.sources[:number])
            if number < first.source:
                continue
            start = first if number == first.source else Position(number, -1, -1)
            for record, piece, data, text in self._pieces(source, start):
                if (record, piece) <= (start.record, start.piece):
                    continue
                if not text or text.isspace():
                    self.empty, empty = self.empty + 1, empty + 1
                    continue
                size = len(data) if self.errors == "strict" else len(text.encode())
                yield Document(text, size, Position(number, record, piece), empty)
                empty = 0

    def _pieces(self, source: Source, start: Position) -> Iterator[tuple[int, int, bytes, str]]:
        if source.kind == "txt":
            yield from self._text_file(source)
            return
        for record, data in self._records(source, start.record):
            for piece, part in enumerate(cut(data, self.limit)):
                yield record, piece, part, part.decode("utf-8", self.errors)

    def _text_file(self, source: Source) -> Iterator[tuple[int, int, bytes, str]]:
        with ByteStream(source) as stream:
            self._stream = stream
            try:
                held = stream.read(self.limit)
                held = held.removeprefix(_MARK)
                position, line, piece, ended = stream.position - len(held), 1, 0, False
                while not ended or held:
                    while len(held) <= self.limit and not ended:
                        more = stream.read(max(self.limit, 1 << 16))
                        held, ended = held + more, not more
                    place = _cut(held, self.limit) if len(held) > self.limit else len(held)
                    data, held = held[:place], held[place:]
                    yield 0, piece, data, self._decoded(data, source.name, line, position)
                    piece, line, position = piece + 1, line + data.count(b"\n"), position + len(data)
            finally:
                self._stream = None

    def _decoded(self, data: bytes, name: str, line: int, position: int) -> str:
        try:
            return data.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            line += data.count(b"\n", 0, error.start)
            raise DataError(f"{name}: not UTF-8 at line {line}, byte {position + error.start} of the text; convert it, "
                            "or prepare with --errors replace") from error

    def _records(self, source: Source, start: int) -> Iterator[tuple[int, bytes]]:
        """(number, UTF-8 text) of the records from number `start` on."""
        if source.kind == "jsonl":
            rows = self._json_lines(source, start)
        elif source.kind == "parquet":
            rows = _parquet_rows(source, max(start, 0), self.text_field, self.title_field)
        else:
            rows = _hub_rows(source, max(start, 0))
        for record, row in rows:
            word = "line" if source.kind == "jsonl" else "row"
            yield record, self._text(row, f"{source.name}: {word} {record + 1}")

    def _text(self, row: Any, where: str) -> bytes:
        if not isinstance(row, dict):
            raise DataError(f"{where}: an object with a field {self.text_field!r} is expected, got {_short(row)}")
        if self.text_field not in row:
            raise DataError(f"{where}: no field {self.text_field!r}, but {', '.join(map(repr, row)) or 'none at all'}; "
                            "name the field that holds the text (--text-field)")
        text = row[self.text_field]
        text = "" if text is None else text
        if not isinstance(text, str):
            raise DataError(f"{where}: field {self.text_field!r} should be a text, got {_short(text)}")
        title = row.get(self.title_field) if self.title_field and self.title_field != self.text_field else None
        if isinstance(title, str) and title and text.strip():
            text = f"{title}\n\n{text}"
        try:
            return text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a character, "\ud800"
            if self.errors == "replace":
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            raise DataError(f"{where}: the text holds half a character (a lone surrogate) at place {error.start}; mend "
                            "it, or prepare with --errors replace") from error

    def _json_lines(self, source: Source, start: int) -> Iterator[tuple[int, Any]]:
        with ByteStream(source) as stream:
            self._stream = stream
            try:
                number = -1
                while line := stream.readline(RECORD_LIMIT + 1):
                    number += 1
                    if number == 0:
                        line = line.removeprefix(_MARK)
                    if len(line) > RECORD_LIMIT:
                        raise DataError(f"{source.name}: line {number + 1} is longer than {RECORD_LIMIT >> 20} MiB; a "
                                        ".jsonl file holds one document a line (a .txt file may be of any size)")
                    if number < start or not line.strip():
                        continue
                    text = self._decoded(line, source.name, number + 1, stream.position - len(line))
                    try:
                        value = json.loads(text)
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{source.name}: line {number + 1} is no JSON ({error})") from error
                    yield number, value
            finally:
                self._stream = None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _parquet_rows(source: Source, start: int, text_field: str, title_field: str | None
                  ) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("reading .parquet files needs a package: pip install 'tdlm[data]'") from None
    number = 0
    try:
        with parquet.ParquetFile(Path(source.name).expanduser()) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in (text_field, title_field)]
            if text_field not in names:  # the caller tells which field it misses, and which there are
                yield start, dict.fromkeys(names)
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count <= start:
                    number += count
                    continue
                for batch in file.iter_batches(batch_size=128, row_groups=[group], columns=columns):
                    rows = batch.to_pylist() if number + len(batch) > start else []
                    yield from ((number + k, row) for k, row in enumerate(rows) if number + k >= start)
                    number += len(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source.name}: damaged, or no parquet file, behind row {number} ({error})") from error


def _hub_rows(source: Source, start: int) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ImportError:
        raise DataError("reading datasets of the Hugging Face hub needs a package: pip install 'tdlm[data]'") from None
    name, config, split = (*source.name.removeprefix("hf:").split(":"), "", "")[:3]
    number = start
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for row in rows.skip(start) if start else rows:
            yield number, row
            number += 1
    except DataError:
        raise
    except Exception as error:  # the hub, the network and the dataset's own code raise whatever they like
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{source.name}: cannot be reached or read behind row {number} ({detail}); check the name and "
                        "the network, or give files instead") from error


def documents(inputs: Sequence[str | Path | Source], **settings: Any) -> Iterator[Document]:
    """The documents of files, folders and hub datasets, one after another (settings as for `Documents`)."""
    return iter(Documents(inputs, **settings))
