"""Where documents come from: files (plain or compressed), folders and hub datasets, named and opened."""
from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from ..errors import DataError

_COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")
_KINDS = {f".{kind}{end}": kind for kind in ("txt", "jsonl") for end in _COMPRESSIONS} | {".parquet": "parquet"}
SUPPORTED = ".txt and .jsonl (also .gz, .bz2, .xz, .zst), .parquet"
OPENWEBTEXT = "Skylion007/openwebtext"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Source:
    """One file, or one dataset of the hub. Two sources that compare equal are taken to hold the same bytes."""
    name: str  # as the user gave it (files of a folder: the folder's name and the rest)
    kind: str  # txt | jsonl | parquet | hub
    size: int = 0
    modified: int = 0  # ns since the epoch

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "size": self.size, "modified": self.modified}


def _kind(path: Path) -> str | None:
    return next((kind for end, kind in _KINDS.items() if path.name.lower().endswith(end)), None)


def _file(path: Path) -> Source:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: this kind of file cannot be read; supported are {SUPPORTED}")
    try:
        about = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return Source(str(path), kind, about.st_size, about.st_mtime_ns)


def resolve(inputs: Sequence[str | Path | Source]) -> list[Source]:
    """The sources that some inputs stand for, in order: a folder stands for its supported files, sorted."""
    found: list[Source] = []
    for item in inputs:
        if isinstance(item, Source):
            found.append(item)
            continue
        name = str(item)
        path = Path(name).expanduser()
        if name == "openwebtext" and not path.exists():
            name = f"hf:{OPENWEBTEXT}"
        if name.startswith("hf:"):
            if not _HUB_NAME.fullmatch(name[3:]):
                raise DataError(f"{name}: expected is hf:OWNER/NAME, or with :CONFIG or :CONFIG:SPLIT behind it")
            found.append(Source(name, "hub"))
        elif path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.is_file() and _kind(one)
                           and not any(part.startswith(".") for part in one.relative_to(path).parts))
            if not files:
                raise DataError(f"{path}: the folder holds no file that can be read; supported are {SUPPORTED}")
            found += map(_file, files)
        elif path.exists():
            found.append(_file(path))
        elif _HUB_NAME.fullmatch(name) and _kind(path) is None:
            found.append(Source(f"hf:{name}", "hub"))
        else:
            raise DataError(f"{name}: no such file or folder (a dataset of the Hugging Face hub is hf:OWNER/NAME)")
    if not found:
        raise DataError(f"at least one input is expected: a file, a folder or hf:OWNER/NAME; supported are {SUPPORTED}")
    return found


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a .zst file with any number of frames; unlike zstandard's own reader it notices when the
    file ends in the middle of a frame."""

    _PIECE = 1 << 14  # compressed bytes at a time: bounds what a very well compressed piece can grow to

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError("reading .zst files needs a package: pip install 'tdlm[data]'") from None
        self._raw, self._frame, self._started = raw, None, False
        self._new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._error = zstandard.ZstdError
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._rest or self._raw.read(self._PIECE)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    end = path.suffix.lower()
    if end == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if end == ".bz2":
        return bz2.BZ2File(raw)  # type: ignore[return-value]
    if end == ".xz":
        return lzma.LZMAFile(raw)  # type: ignore[return-value]
    if end == ".zst":
        return io.BufferedReader(_ZstdStream(raw), 1 << 17)  # type: ignore[return-value]
    return raw


class ByteStream:
    """The decompressed bytes of a text file, in bounded pieces. Every fault becomes a DataError that says where."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0  # in the decompressed bytes
        path = Path(source.name).expanduser()
        try:
            self._raw = open(path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._stream = _decompressed(path, self._raw)
        except DataError:
            self._raw.close()
            raise

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            raise DataError(f"{self.source.name}: the compressed file is cut off behind byte {self.position} of its "
                            "text; fetch or compress it again") from error
        except (OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{self.source.name}: damaged or not of the kind its name says, behind byte "
                            f"{self.position} of its text ({error})") from error

    def read(self, size: int) -> bytes:
        with self._faults():
            data = self._stream.read(size)
        self.position += len(data)
        return data

    def readline(self, limit: int) -> bytes:
        with self._faults():
            line = self._stream.readline(limit)
        self.position += len(line)
        return line

    def raw_position(self) -> int:
        """How far into the file itself, for progress."""
        return 0 if self._raw.closed else self._raw.tell()

    def close(self) -> None:
        if self._stream is not self._raw:
            self._stream.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
