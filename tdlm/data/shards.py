"""The files of a prepared folder while they are written, and the journal that survives a kill.

Everything is written under `OUT.partial`. A shard counts when it is on the disk (fsync), the starts of its documents
are, and then the journal, replaced atomically, names it. What stands behind the journal's last shard is overwritten by
the next run; so whatever the moment of a kill, the files end up the same bytes as without one.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .. import files
from ..errors import DataError
from .documents import Position

FORMAT = 1
MANIFEST, JOURNAL, STARTS, COUNTS, TOKENIZER = (
    "manifest.json", "journal.json", "documents.bin", "counts.bin", "tokenizer.json")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: was X, is now Y` for the values that differ; lists of sources by their members."""
    found: list[str] = []
    for name in sorted({*was, *now}):
        a, b = was.get(name), now.get(name)
        if a == b:
            continue
        if name == "sources" and isinstance(a, list) and isinstance(b, list):
            for one, two in zip(a, b, strict=False):
                found += [f"{one.get('name')}: {part}" for part in differences(one, two)] if one != two else []
            if len(a) != len(b):
                found.append(f"number of source files: was {len(a)}, is now {len(b)}")
        else:
            found.append(f"{name}: was {a!r}, is now {b!r}")
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time writes a folder. The lock is the folder's own (no file to leave behind) and goes with
    the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process is preparing this folder right now; wait for it, or choose "
                            "another --out") from None
        if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise DataError(f"{folder}: another process has just finished with this folder; run the command again")
        yield
    finally:
        os.close(handle)


class ShardWriter:
    """Token documents -> shards, in order. `journal` is what is safe on the disk."""

    def __init__(self, folder: Path, *, dtype: np.dtype, eos: int | None, shard_tokens: int, sources: int,
                 journal: dict[str, Any]) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self._mark = b"" if eos is None else np.array([eos], dtype=dtype).tobytes()
        self.journal: dict[str, Any] = {"shards": [], "documents": 0, "tokens": 0, "text_bytes": 0, "empty": 0,
                                        "position": None, "by_source": [0] * sources, **journal}
        self.documents: int = self.journal["documents"]
        self.tokens: int = self.journal["tokens"]
        self.text_bytes: int = self.journal["text_bytes"]
        self.empty: int = self.journal["empty"]
        self.by_source: list[int] = list(self.journal["by_source"])
        self.position: Position | None = Position(*self.journal["position"]) if self.journal["position"] else None
        self._check()
        self._open()

    def _check(self) -> None:
        """The files are what the journal says; what is behind it is cut off."""
        for shard in self.journal["shards"]:
            path = self.folder / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["size"]:
                raise DataError(f"{path}: {shard['size']} bytes are expected here, the unfinished preparation is "
                                f"damaged; delete {self.folder} and start again")
        starts = self.folder / STARTS
        with open(starts, "ab") as file:
            if file.tell() < self.documents * 8:
                raise DataError(f"{starts}: too short, the unfinished preparation is damaged; delete {self.folder} and "
                                "start again")
            file.truncate(self.documents * 8)

    def _open(self) -> None:
        self._name = shard_name(len(self.journal["shards"]))
        self._file = open(self.folder / self._name, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by _finish, close
        self._hash = xxhash.xxh3_128()
        self._starts: list[int] = []
        self._first_token = self.tokens

    def add(self, rows: Sequence[np.ndarray], size: int, position: Position, empty: int) -> None:
        """The documents made of the one at `position` (one, as a rule); `size` is its UTF-8 length."""
        self.empty += empty
        for row in rows:
            if not len(row):
                self.empty += 1
                continue
            data = row.astype(self.dtype, copy=False).tobytes() + self._mark
            self._file.write(data)
            self._hash.update(data)
            self._starts.append(self.tokens)
            self.tokens += len(data) // self.dtype.itemsize
            self.documents += 1
            self.by_source[position.source] += 1
        self.text_bytes += size
        self.position = position
        if self.tokens - self._first_token >= self.shard_tokens:
            self._finish()
            self._open()

    def _finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with open(self.folder / STARTS, "ab") as file:
            file.write(np.array(self._starts, dtype=np.uint64).tobytes())
            file.flush()
            os.fsync(file.fileno())
        tokens = self.tokens - self._first_token
        shard = {"file": self._name, "documents": len(self._starts), "tokens": tokens,
                 "size": tokens * self.dtype.itemsize, "hash": self._hash.hexdigest()}
        self.journal = {**self.journal, "shards": [*self.journal["shards"], shard], "documents": self.documents,
                        "tokens": self.tokens, "text_bytes": self.text_bytes, "empty": self.empty,
                        "position": self.position, "by_source": list(self.by_source)}
        files.write_json(self.folder / JOURNAL, self.journal)

    def finish(self) -> dict[str, Any]:
        """Close the last shard; the journal now tells everything."""
        if self._starts:
            self._finish()
        else:
            self._file.close()
            (self.folder / self._name).unlink()
        return self.journal

    def close(self) -> None:
        self._file.close()


def count_tokens(folder: Path, shards: Sequence[dict[str, Any]], dtype: np.dtype, size: int, stop: int) -> np.ndarray:
    """How often each id occurs among the first `stop` tokens: int64 (size,)."""
    counts = np.zeros(size, dtype=np.int64)
    for shard in shards:
        left = min(shard["tokens"], stop)
        stop -= left
        with open(folder / shard["file"], "rb") as file:
            while left:
                ids = np.frombuffer(file.read(min(left, 1 << 20) * dtype.itemsize), dtype=dtype)
                counts += np.bincount(ids, minlength=size)
                left -= len(ids)
    return counts
