"""Rows for the model as pure functions: (seed, step, rank, micro-batch) -> token ids. Nothing has state.

Sample g = step * batch + row. Every epoch shows each item once, in an order that is a keyed permutation; the crop of a
sample is a function of (seed, g). Ranks take consecutive blocks of the global batch and micro-batches consecutive
blocks of those, so that neither changes what a step sees.

Two layouts of a row of S tokens:
- `document` (the paper's): one document, BOS + text + EOS where the tokenizer has them. A longer one is cropped at
  random, a shorter one padded on the right with PAD. All windows are equally likely, the last one included; the
  reference never takes the last one, so that it never sees the end of a long document (its upper end is exclusive).
- `packed`: the split's token stream (documents joined by EOS) cut into rows of S; no PAD, the rest at the end is
  left out.
"""
from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..errors import ConfigError, DataError
from .store import TokenStore

Layout = Literal["document", "packed"]
LAYOUTS = ("document", "packed")


class Batch(NamedTuple):
    tokens: Tensor  # int64 (b, S)
    rows: Tensor  # int64 (b,): sample numbers within the step's global batch; in evaluation, numbers of the items
    prepared: Any = None  # the processor's part of the loss, where it was made beforehand


class _Items:
    """The items of a split that rows are made of: documents or pieces of the stream, numbered from 0."""

    def __init__(self, store: TokenStore, length: int, layout: str, split: str) -> None:
        if layout not in LAYOUTS:
            raise ConfigError(f"a row layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
        if length < 1:
            raise ConfigError(f"the length of a row must be at least 1, got {length}")
        self.store, self.length, self.layout, self.split = store, length, layout, split
        self.documents = store.documents(split)
        self.first, stop = store.token_range(split)
        self.count = len(self.documents) if layout == "document" else (stop - self.first) // length
        if not self.documents:
            raise DataError(f"{store.folder}: the {split} split is empty; prepare the folder with validation documents")
        if not self.count:
            raise DataError(f"{store.folder}: the {split} split has {stop - self.first} tokens, fewer than one packed "
                            f"row of {length}; use a shorter length or the layout 'document'")
        self.bos = -1 if store.bos_id is None else store.bos_id
        self.front = int(store.bos_id is not None)

    def fill(self, items: Sequence[int], uniform: np.ndarray) -> Tensor:
        """The rows of some items: int64 (len(items), S). `uniform` places the crop of each."""
        store, length = self.store, self.length
        out = np.full((len(items), length), store.pad_id, dtype=np.int64)
        if self.layout == "packed":
            for row, item in enumerate(items):
                start = self.first + item * length
                out[row] = store.stream(start, start + length)
            return torch.from_numpy(out)
        numbers = np.asarray(items, dtype=np.int64) + self.documents.start
        starts, stops = store.starts[numbers], store.starts[numbers + 1]  # EOS included
        windows = np.maximum(stops - starts + self.front - length, 0) + 1
        crops = np.minimum((uniform * windows).astype(np.int64), windows - 1)
        for row, (start, stop, crop) in enumerate(zip(starts.tolist(), stops.tolist(), crops.tolist(), strict=True)):
            begin = 0
            if self.front:
                if crop == 0:
                    out[row, 0], begin = self.bos, 1
                else:
                    crop -= 1
            taken = min(stop - start - crop, length - begin)
            out[row, begin:begin + taken] = store.stream(start + crop, start + crop + taken)
        return torch.from_numpy(out)


def _uniform(numbers: Tensor, *key: int | str) -> np.ndarray:
    return rng.to_uniform(rng.words(numbers, 1, *key))[:, 0].numpy()


class TrainRows:
    """The training rows of every step. `batch` is the number of rows of a step over all ranks and micro-batches."""

    def __init__(self, store: TokenStore, *, length: int, layout: str, batch: int, seed: int,
                 split: str = "train") -> None:
        if batch < 1:
            raise ConfigError(f"a batch must have at least one row, got {batch}")
        self._items = _Items(store, length, layout, split)
        self.batch_size, self.seed, self.length = batch, seed, length
        self.items = self._items.count
        """How many different items (documents, or packed rows) an epoch shows."""

    def batch(self, step: int, rank: int = 0, world: int = 1, micro: int = 0, micros: int = 1) -> Batch:
        """The rows of one rank's micro-batch at a step."""
        if self.batch_size % (world * micros):
            raise ConfigError(f"a batch of {self.batch_size} rows cannot be shared equally by {world} ranks x {micros} "
                              "micro-batches; choose numbers that divide it")
        if step < 0 or not 0 <= rank < world or not 0 <= micro < micros:
            raise ConfigError(f"no such part of a batch: step {step}, rank {rank} of {world}, micro-batch {micro} of "
                              f"{micros}")
        size = self.batch_size // (world * micros)
        rows = torch.arange(size) + (rank * micros + micro) * size
        samples = rows + step * self.batch_size
        epochs, places = samples // self.items, samples % self.items
        items = torch.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            items[here] = rng.permuted(places[here], self.items, self.seed, "order", self._items.split, epoch)
        return Batch(self._items.fill(items.tolist(), _uniform(samples, self.seed, "crop")), rows)


class EvalRows(Sequence):
    """The rows of an evaluation, the same in every run: the crop of a document depends on its number alone."""

    def __init__(self, store: TokenStore, *, length: int, layout: str, split: str = "valid",
                 documents: Sequence[int] | None = None, limit: int | None = None) -> None:
        self._items = _Items(store, length, layout, split)
        chosen = range(self._items.count) if documents is None else list(documents)
        if documents is not None and not all(0 <= item < self._items.count for item in chosen):
            raise DataError(f"{store.folder}: rows of {split} are numbered 0 to {self._items.count - 1}, got others")
        if limit is not None and limit < 1:
            raise ConfigError(f"at least one row must be evaluated, got a limit of {limit}")
        self.numbers: Sequence[int] = chosen if limit is None else chosen[:limit]
        self.length = length

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, start: int, stop: int) -> Batch:
        """Rows start..stop-1 (fewer at the end)."""
        numbers = torch.tensor(list(self.numbers[start:stop]), dtype=torch.int64)
        return Batch(self._items.fill(numbers.tolist(), _uniform(numbers, "evaluation crop")), numbers)

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows in order, `size` at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(start, start + size)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        """(tokens (S,), number of the document within the split - or of the packed row)."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        batch = self.batch(index % len(self), index % len(self) + 1)
        return batch.tokens[0], int(batch.rows[0])


def eval_rows(store: TokenStore, *, length: int, layout: str, split: str = "valid",
              documents: Sequence[int] | None = None, limit: int | None = None) -> EvalRows:
    """The fixed rows of a split: all, those of some `documents` (numbers within the split), or the first `limit`."""
    return EvalRows(store, length=length, layout=layout, split=split, documents=documents, limit=limit)


class Rows(Protocol):
    """Where training's micro-batches come from."""

    def batch(self, step: int, rank: int, world: int, micro: int, micros: int) -> Batch:
        ...


class Prefetch:
    """Batches made by a thread while the model works: an iterator over the micro-batches of all `steps` in order.

    At most `depth` wait; an exception of the thread is raised where its batch was expected. Close it (or use it in a
    `with`) to stop the thread early.
    """

    def __init__(self, rows: Rows, steps: Iterable[int], rank: int, world: int, micros: int, depth: int,
                 pin: bool, prepare: Callable[[Batch, int], Any] | None) -> None:
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        self._ended = False

        def work() -> None:
            threads = torch.get_num_threads()
            if prepare is not None:  # beside a GPU: pieces of work too small to be shared out, and all the processor has to do
                torch.set_num_threads(1)
            try:
                for step in steps:
                    for micro in range(micros):
                        batch = rows.batch(step, rank, world, micro, micros)
                        if pin:
                            batch = batch._replace(tokens=batch.tokens.pin_memory())
                        if prepare is not None:
                            batch = batch._replace(prepared=prepare(batch, step))
                        if not self._put(batch):
                            return
            except BaseException as error:  # handed to the consumer, which raises it
                self._put(error)
            else:
                self._put(None)
            finally:
                torch.set_num_threads(threads)  # threads that are started later would inherit it

        self._thread = threading.Thread(target=work, name="prefetch", daemon=True)
        self._thread.start()

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._ended or self._stop.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Batch):
            return item
        self._ended = True
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(rows: Rows, steps: Iterable[int], *, rank: int = 0, world: int = 1, micros: int = 1, depth: int = 4,
             pin: bool = False, prepare: Callable[[Batch, int], Any] | None = None) -> Prefetch:
    """Start making batches in the background. `pin`: page-locked memory, from which a copy to a GPU does not wait.
    `prepare(batch, step)`: what else can be made there."""
    return Prefetch(rows, steps, rank, world, micros, depth, pin, prepare)
