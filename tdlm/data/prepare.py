"""Documents -> a prepared folder of token shards, on all cores, in bounded memory, and again behind a kill.

The calling thread reads, cuts and writes; `workers` threads tokenize (the tokenizers library releases Python's lock,
so threads use all cores, and a kill leaves no orphans behind). Chunks are written in the order in which they were read
and cut by their content alone: the files do not depend on the number of workers, nor on interruptions.
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import DataError
from . import shards
from .documents import LIMIT, Document, Documents, Position
from .shards import ShardWriter
from .sources import OPENWEBTEXT, Source, resolve
from .tokenizer import Tokenizer, train_bpe

SHARD_TOKENS = 1 << 26
BPE_BYTES = 64 << 20  # a BPE is trained on so much text from the beginning of the corpus
_CHUNK_BYTES, _CHUNK_DOCUMENTS = 512 * 1024, 1024
_PAPER_VALID, _VALID = 100_000, 0.01  # OpenWebText: the paper's split; everything else
_SINGLE = 0.1  # of a corpus of one document, where a number of documents cannot be set aside


@dataclass(frozen=True)
class Progress:
    """What `progress` is told about twice a second: everything done so far, earlier runs counted in."""
    documents: int
    tokens: int
    text_bytes: int
    fraction: float | None  # of the input files; None where their size is not known (hub)
    seconds: float  # of this run
    resumed: int  # documents that an earlier run had finished


def prepare(inputs: Sequence[str | Path] | str | Path, out: str | Path, *,
            tokenizer: str | Path | Tokenizer = "bpe:4096", valid: float | None = None,
            valid_inputs: Sequence[str | Path] | str | Path = (), workers: int | None = None,
            shard_tokens: int = SHARD_TOKENS, text_field: str = "text", limit: int = LIMIT, errors: str = "strict",
            progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Write the folder `out` (or find it already written) and return its manifest.

    `tokenizer`: a Tokenizer, a tokenizer.json, `bytes`, or `bpe:SIZE` to train one. `valid`: the last documents as
    validation, as a number or a fraction (default 0.01; OpenWebText: 100,000); or `valid_inputs`.
    """
    inputs, held_out = _sequence(inputs), _sequence(valid_inputs)
    train_sources, valid_sources = resolve(inputs), resolve(held_out) if held_out else []
    job = _Job(train_sources, valid_sources, Path(out).expanduser(), tokenizer,
               _checked_valid(valid, train_sources, valid_sources), _positive(shard_tokens, "shard_tokens"),
               text_field, limit, errors)
    workers = _positive(_cores() if workers is None else workers, "workers")
    job.reader()  # these say what is wrong with the settings before anything is written
    job.given_tokenizer()
    if (done := job.finished(job.out)) is not None:
        return done
    partial = job.out.with_name(job.out.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with shards.locked(partial):
            if (done := job.finished(job.out)) is not None:  # by somebody else, since we looked
                return done
            return _Run(job, partial, workers, progress).run()
    except OSError as error:
        raise DataError(f"{error.filename or partial}: cannot be written ({error.strerror or error}); mend it, or "
                        "choose another --out; the same command continues where it stopped") from error


def _sequence(given: Sequence[str | Path] | str | Path) -> list[str | Path]:
    return [given] if isinstance(given, str | Path) else list(given)


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise DataError(f"{name} must be at least 1, got {value}")
    return value


def _checked_valid(valid: float | None, train: list[Source], held_out: list[Source]) -> float | None:
    if held_out:
        if valid is not None:
            raise DataError("either valid (a number or fraction of documents) or valid_inputs is expected, not both")
        return None
    if valid is None:
        return _PAPER_VALID if any(source.name.startswith(f"hf:{OPENWEBTEXT}") for source in train) else _VALID
    if isinstance(valid, bool) or valid < 0 or (isinstance(valid, float) and valid >= 1):
        raise DataError(f"valid is a number of documents (0, 1, 2, ...) or a fraction between 0 and 1, got {valid!r}")
    return valid


class _NoSplit(DataError):
    """Too few documents for the validation split that was asked for."""


@dataclass(frozen=True)
class _Job:
    """What is to be prepared. `settings` decides whether something found on the disk is the same."""
    train: list[Source]
    held_out: list[Source]
    out: Path
    tokenizer: str | Path | Tokenizer
    valid: float | None  # an int is a number of documents, a float a fraction
    shard_tokens: int
    text_field: str
    limit: int
    errors: str

    @property
    def bpe_size(self) -> int | None:
        if not (isinstance(self.tokenizer, str) and self.tokenizer.startswith("bpe:")):
            return None
        size = self.tokenizer[4:]
        if not size.isdigit():
            raise DataError(f"a tokenizer to train is bpe:SIZE, such as bpe:4096; got {self.tokenizer!r}")
        return int(size)

    def settings(self, chosen: Tokenizer | None) -> dict[str, Any]:
        sources = [{**source.to_json(), "split": split} for split, some in (("train", self.train), ("valid",
                   self.held_out)) for source in some]
        return {"tokenizer": chosen.hash if chosen else str(self.tokenizer), "valid": self.valid,
                "shard_tokens": self.shard_tokens, "text_field": self.text_field, "limit": self.limit,
                "errors": self.errors, "sources": sources}

    def reader(self, sources: Sequence[Source] = (), after: Position | None = None) -> Documents:
        return Documents(sources or [*self.train, *self.held_out], text_field=self.text_field, limit=self.limit,
                         errors=self.errors, after=after)

    def given_tokenizer(self) -> Tokenizer | None:
        """None where one has to be trained."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        return None if self.bpe_size is not None else Tokenizer.load(self.tokenizer)

    def finished(self, folder: Path) -> dict[str, Any] | None:
        """The manifest of a complete folder made with these settings; None where there is nothing yet."""
        path = folder / shards.MANIFEST
        if not path.is_file():
            if folder == self.out and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
                raise DataError(f"{folder}: exists and is no prepared folder; choose another --out")
            return None
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            was = manifest["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error}); delete {folder} and prepare it again") from error
        if found := shards.differences(was, self.settings(self.given_tokenizer())):
            raise DataError(f"{folder}: already prepared with other settings ({'; '.join(found)}); choose another "
                            "--out, or delete this folder first")
        return manifest


class _Run:
    """One attempt at a job, in its partial folder."""

    def __init__(self, job: _Job, partial: Path, workers: int,
                 progress: Callable[[Progress], None] | None) -> None:
        self.job, self.partial, self.progress = job, partial, progress
        self.workers = workers
        self.started, self.told = time.monotonic(), 0.0

    def run(self) -> dict[str, Any]:
        if not (self.partial / shards.JOURNAL).exists() and (manifest := self.job.finished(self.partial)) is not None:
            self._publish()  # killed between the last two steps
            return manifest
        for unfinished in self.partial.glob(".*.tmp"):  # of a file that was being replaced when we were killed
            unfinished.unlink()
        given = self.job.given_tokenizer()
        settings = self.job.settings(given)
        journal = self._journal(settings)
        writer: ShardWriter | None = None
        try:
            if self.job.held_out and next(iter(self.job.reader(self.job.held_out)), None) is None:
                raise DataError("no text was found in the validation files; give other files")
            tokenizer = self._tokenizer(given)
            if not journal:
                tokenizer.save(self.partial / shards.TOKENIZER)
            writer = ShardWriter(self.partial, dtype=tokenizer.dtype, eos=tokenizer.eos_id,
                                 shard_tokens=self.job.shard_tokens, sources=len(settings["sources"]),
                                 journal={"settings": settings, "tokenizer": tokenizer.hash, **journal})
            self._write(writer, tokenizer)
            manifest = self._manifest(writer, tokenizer, settings)
        except BaseException as error:
            if writer is not None:
                writer.close()
            hopeless = isinstance(error, _NoSplit) and self.job.bpe_size is not None  # the split is in the tokenizer
            if hopeless or not (writer.journal if writer is not None else journal).get("shards"):
                shutil.rmtree(self.partial, ignore_errors=True)  # nothing there that would save work
            raise
        files.write_json(self.partial / shards.MANIFEST, manifest)
        (self.partial / shards.JOURNAL).unlink()
        self._publish()
        return manifest

    def _publish(self) -> None:
        files.sync(self.partial)
        os.rename(self.partial, self.job.out)
        files.sync(self.job.out.parent)

    def _journal(self, settings: dict[str, Any]) -> dict[str, Any]:
        path = self.partial / shards.JOURNAL
        if not path.exists():
            return {}
        try:
            journal = json.loads(path.read_text(encoding="utf-8"))
            was = dict(journal["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged ({error}); delete {self.partial} and start again") from error
        if self.job.bpe_size is None:  # the split is made at the very end, so another one costs nothing
            was["valid"] = settings["valid"]
        if found := shards.differences(was, settings):
            raise DataError(f"{self.partial}: an unfinished preparation with other settings ({'; '.join(found)}); use "
                            "those to continue it, or delete this folder to start again")
        return {**journal, "settings": settings}

    def _tokenizer(self, given: Tokenizer | None) -> Tokenizer:
        if given is not None:
            return given
        if (self.partial / shards.JOURNAL).exists():
            return Tokenizer.load(self.partial / shards.TOKENIZER)
        return train_bpe(_training_texts(self.job), self.job.bpe_size or 0)

    def _write(self, writer: ShardWriter, tokenizer: Tokenizer) -> None:
        job = self.job
        resumed, yielded = writer.documents, 0
        reader = job.reader(after=writer.position)
        pairs = tokenized(reader, tokenizer, self.workers)
        alone = bool(job.valid) and not writer.documents
        with contextlib.closing(pairs):
            for document, rows in _split_single(pairs, job.valid or 0) if alone else ((d, [row]) for d, row in pairs):
                writer.add(rows, document.size, document.position, document.empty)
                yielded += document.empty
                self._tell(writer, reader, resumed)
        writer.empty += reader.empty - yielded  # those behind the last document
        writer.finish()
        self._tell(writer, reader, resumed, last=True)

    def _tell(self, writer: ShardWriter, reader: Documents, resumed: int, last: bool = False) -> None:
        now = time.monotonic()
        if self.progress is None or (now - self.told < 0.5 and not last):
            return
        self.told = now
        known = reader.bytes_total and all(source.kind != "hub" for source in reader.sources)
        fraction = 1.0 if last else min(1.0, reader.bytes_read() / reader.bytes_total) if known else None
        self.progress(Progress(writer.documents, writer.tokens, writer.text_bytes, fraction, now - self.started,
                               resumed))

    def _manifest(self, writer: ShardWriter, tokenizer: Tokenizer, settings: dict[str, Any]) -> dict[str, Any]:
        """The last files, and what the folder holds. Nothing in it depends on when or how the text was prepared."""
        train = _train_documents(writer, self.job)
        starts = np.fromfile(self.partial / shards.STARTS, dtype=np.uint64, count=writer.documents)
        starts = np.append(starts, np.uint64(writer.tokens))
        files.write_bytes(self.partial / shards.STARTS, starts.tobytes())
        stop = int(starts[train])
        counts = shards.count_tokens(self.partial, writer.journal["shards"], writer.dtype, tokenizer.size, stop)
        files.write_bytes(self.partial / shards.COUNTS, counts.tobytes())
        written = {name: {"size": (self.partial / name).stat().st_size, "hash": files.file_hash(self.partial / name)}
                 for name in (shards.STARTS, shards.COUNTS, shards.TOKENIZER)}
        sources = [{**source, "documents": documents}
                   for source, documents in zip(settings["sources"], writer.by_source, strict=True)]
        return {"format": shards.FORMAT, "tokenizer": tokenizer.hash, "vocabulary": tokenizer.size,
                "dtype": writer.dtype.name, "pad": tokenizer.pad_id, "eos": tokenizer.eos_id, "bos": tokenizer.bos_id,
                "documents": writer.documents, "tokens": writer.tokens, "text_bytes": writer.text_bytes,
                "empty_documents_skipped": writer.empty,
                "splits": {"train": [0, train], "valid": [train, writer.documents]},
                "shards": writer.journal["shards"], "files": written, "sources": sources, "settings": settings}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _train_documents(writer: ShardWriter, job: _Job) -> int:
    """How many of the documents, the first ones, are for training."""
    total = writer.documents
    if not total:
        raise DataError(f"no text was found in {', '.join(source.name for source in job.train[:3])}"
                        f"{' and others' if len(job.train) > 3 else ''} ({writer.empty} empty documents); give other "
                        "files")
    if job.held_out:
        train = sum(writer.by_source[:len(job.train)])
        if not 0 < train < total:
            raise DataError(f"no text was found in the {'validation' if train else 'training'} files; give other files")
        return train
    aside = _aside(job.valid or 0, total)
    if aside >= total:
        raise _NoSplit(f"the corpus has {total} documents, setting aside {aside} for validation leaves none to train "
                        "on; ask for fewer (--valid), or give more text")
    return total - aside


def _aside(valid: float, total: int) -> int:
    """The number of validation documents among `total`."""
    if not valid:
        return 0
    return max(1, round(valid * total)) if isinstance(valid, float) else valid


def _split_single(pairs: Iterator[tuple[Document, np.ndarray]], valid: float
                  ) -> Iterator[tuple[Document, list[np.ndarray]]]:
    """A corpus of a single document is cut in two, so that there is something to validate on."""
    first = next(pairs, None)
    second = next(pairs, None)
    if first is None:
        return
    if second is None and valid <= 1:
        row = first[1]
        cut = len(row) - max(1, round(len(row) * (valid if isinstance(valid, float) else _SINGLE)))
        if cut < 1:
            raise DataError(f"the only document has {len(row)} tokens, which cannot be split; give more text, or "
                            "--valid 0")
        yield first[0], [row[:cut], row[cut:]]
        return
    yield first[0], [first[1]]
    if second is not None:
        yield second[0], [second[1]]
    for document, row in pairs:
        yield document, [row]


def _training_texts(job: _Job) -> list[str]:
    """Text to train a tokenizer on: from the beginning of the corpus, without the validation documents if it is
    small enough to see where they begin."""
    texts: list[str] = []
    size = 0
    for document in job.reader(job.train):
        texts.append(document.text)
        size += document.size
        if size >= BPE_BYTES:
            return texts
    valid = job.valid or 0
    if len(texts) == 1 and valid:
        keep = 1 - (valid if isinstance(valid, float) else _SINGLE)
        return [texts[0][:max(1, int(len(texts[0]) * keep))]]
    aside = _aside(valid, len(texts))
    return texts[:max(1, len(texts) - aside)]


@contextlib.contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Our own threads share out the work; the library must not start as many again in each of them."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _chunks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.size
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def tokenized(reader: Documents, tokenizer: Tokenizer, workers: int) -> Generator[tuple[Document, np.ndarray]]:
    """The documents with their ids, in order; at most a few chunks for each worker are in memory."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    pending: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()

    def take() -> Iterator[tuple[Document, np.ndarray]]:
        chunk, future = pending.popleft()
        return zip(chunk, future.result(), strict=True)

    try:
        with _one_thread_a_call():
            for chunk in _chunks(iter(reader)):
                pending.append((chunk, pool.submit(tokenizer.encode_batch, [document.text for document in chunk])))
                if len(pending) > 2 * workers + 1:
                    yield from take()
            while pending:
                yield from take()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
