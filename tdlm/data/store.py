"""A prepared folder, opened: memory-mapped token documents and what the manifest says about them.

The global token stream is the documents one after another, each followed by EOS where the tokenizer has one. A document
lies in one shard; a split is a range of documents, and so a range of that stream.
"""
from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..errors import DataError, TokenizerError
from ..files import file_hash
from .shards import COUNTS, FORMAT, MANIFEST, STARTS, TOKENIZER
from .tokenizer import Tokenizer


class TokenStore:
    """Documents of token ids. Opening reads the manifest and checks that every file has its size; `verify=True` reads
    every byte and checks the hashes too."""

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = _manifest(self.folder)
        try:
            self.dtype = np.dtype(self.manifest["dtype"])
            self.splits = {name: range(*bounds) for name, bounds in self.manifest["splits"].items()}
            self.size: int = self.manifest["vocabulary"]
            self.pad_id: int = self.manifest["pad"]
            self.eos_id: int | None = self.manifest["eos"]
            self.bos_id: int | None = self.manifest["bos"]
            files = {shard["file"]: shard for shard in self.manifest["shards"]} | dict(self.manifest["files"])
            self._check(files, verify)
            first = np.cumsum([0] + [shard["tokens"] for shard in self.manifest["shards"]])
            documents: int = self.manifest["documents"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self.folder / MANIFEST}: damaged ({type(error).__name__}: {error}); prepare the folder "
                            "again") from error
        self._first_token = first.astype(np.int64)  # of each shard, and the end
        starts = np.fromfile(self.folder / STARTS, dtype=np.uint64).astype(np.int64)
        if len(starts) != documents + 1 or starts[0] != 0 or starts[-1] != first[-1] or (np.diff(starts) < 0).any():
            raise DataError(f"{self.folder / STARTS}: does not fit the manifest; prepare the folder again")
        self.starts: np.ndarray = starts
        """int64 (documents + 1,): where each document begins in the global token stream."""
        # memmap's own slicing is slow (it makes a memmap); a plain view of the same pages is not.
        self._shards = [np.memmap(self.folder / shard["file"], dtype=self.dtype, mode="r").view(np.ndarray)
                        for shard in self.manifest["shards"]]

    def _check(self, files: dict[str, Any], verify: bool) -> None:
        for name, expected in files.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != expected["size"]:
                raise DataError(f"{path}: {expected['size']} bytes are expected, found "
                                f"{'no such file' if size is None else size}; copy or prepare the folder again")
            if verify and (found := file_hash(path)) != expected["hash"]:
                raise DataError(f"{path}: content is damaged (xxh3_128 {expected['hash']} is expected, found {found}); "
                                "copy or prepare the folder again")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        if tokenizer.hash != self.manifest["tokenizer"]:
            raise TokenizerError(f"{self.folder / TOKENIZER}: not the tokenizer this folder was prepared with (hash "
                                 f"{self.manifest['tokenizer']} is expected, found {tokenizer.hash}); prepare it again")
        return tokenizer

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 (V,): how often each id occurs in the train split, EOS behind each document included."""
        return np.fromfile(self.folder / COUNTS, dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens, the tokenizer and the splits: equal for equal data, wherever it lies."""
        manifest = self.manifest
        shards = [(shard["tokens"], shard["hash"]) for shard in manifest["shards"]]
        content = [manifest["tokenizer"], manifest["dtype"], manifest["splits"], shards,
                   manifest["files"][STARTS]["hash"]]
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    def documents(self, split: str) -> range:
        """The numbers of a split's documents."""
        if split not in self.splits:
            raise DataError(f"{self.folder}: no split {split!r}, but {', '.join(self.splits)}")
        return self.splits[split]

    def token_range(self, split: str) -> tuple[int, int]:
        """The split's part [start, stop) of the global token stream."""
        numbers = self.documents(split)
        return int(self.starts[numbers.start]), int(self.starts[numbers.stop])

    def tokens(self, split: str) -> int:
        """The number of a split's tokens, EOS behind each document included."""
        start, stop = self.token_range(split)
        return stop - start

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, without EOS (a read-only view of the file)."""
        if not 0 <= number < len(self.starts) - 1:
            raise DataError(f"{self.folder}: documents are numbered 0 to {len(self.starts) - 2}, got {number}")
        return self._within(int(self.starts[number]), int(self.starts[number + 1]) - (self.eos_id is not None))

    def _within(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) that lie in one shard."""
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        first = int(self._first_token[shard])
        return self._shards[shard][start - first:stop - first]

    def stream(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the global token stream."""
        if not 0 <= start <= stop <= self._first_token[-1]:
            raise DataError(f"{self.folder}: tokens are numbered 0 to {self._first_token[-1]}, got {start} to {stop}")
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        if shard >= len(self._shards) or stop <= self._first_token[shard + 1]:
            return self._within(start, stop) if stop > start else np.zeros(0, dtype=self.dtype)
        parts = []
        while start < stop:
            end = min(stop, int(self._first_token[shard + 1]))
            parts.append(self._within(start, end))
            start, shard = end, shard + 1
        return np.concatenate(parts)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if folder.with_name(folder.name + ".partial").is_dir():
            raise DataError(f"{folder}: its preparation was not finished; the same 'tdlm prepare' command continues it")
        what = "no such folder" if not folder.exists() else f"not a prepared folder (no {MANIFEST})"
        raise DataError(f"{folder}: {what}; make it with: tdlm prepare INPUT... --out {folder}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the folder again") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise DataError(f"{path}: format {FORMAT} is expected, found {version!r}; prepare the folder with this version")
    return manifest
