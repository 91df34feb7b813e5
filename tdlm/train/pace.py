"""How long a step of training takes here, so that a run can be given minutes: its schedule needs the number of steps in
advance, so that number is measured on a few steps, then fixed and kept in the run's configuration.

What is measured is thrown away: the run itself begins at step 0. The first steps (compilation, caches) do not count, validation
and saving come on top. On a CPU rows are read before the clock starts (in a run a thread reads them ahead); beside a GPU the
thread that prepares steps may be what sets the pace, so there it works as in a run.
"""
from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..assemble import assemble
from ..config import RunConfig, TrainConfig
from ..data.batches import Batch, TrainRows, prefetch
from ..data.store import TokenStore
from .loop import tf32, tree_of
from .step import Trainer, compile_backbone

WARM_UP, TIMED = 6, 8
GROUP = 8
"""A GPU works behind the processor's back, so there the clock stops once for so many steps."""


@dataclass(frozen=True)
class Pace:
    seconds: float
    """Of a training step."""
    threads: int | None
    """What made it fastest on a CPU: all threads, or one. (On a machine that is busy with other things threads wait for one
    another and all together are ten times slower than one.)"""

    @contextlib.contextmanager
    def kept(self) -> Iterator[float]:
        """The seconds; inside, the number of threads that they were measured with."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield self.seconds
        finally:
            torch.set_num_threads(before)


def measured(config: RunConfig, data: Path, tree: Path | None, device: torch.device | str = "cpu") -> Pace:
    """The pace of a run on this device; its learning rate and its number of steps do not matter."""
    device = torch.device(device)
    trainer, rows = _trainer(config, data, tree, device)
    if device.type == "cuda":
        with tf32(device), prefetch(rows, itertools.count(), micros=trainer.micros, pin=True, prepare=trainer.prepare) as ahead:
            return Pace(_seconds(trainer, lambda: itertools.islice(ahead, trainer.micros), math.inf, TIMED, GROUP), None)
    every, found, limit = torch.get_num_threads(), {}, math.inf
    try:
        for threads in dict.fromkeys((1, every)):
            torch.set_num_threads(threads)
            started = time.perf_counter()
            found[threads] = _seconds(trainer, lambda: _micros(trainer, rows), limit, TIMED, 1)
            limit = time.perf_counter() - started
    finally:
        torch.set_num_threads(every)
    best = min(found, key=lambda threads: found[threads])
    return Pace(found[best], best)


def in_minutes(settings: TrainConfig, minutes: float, seconds: float) -> TrainConfig:
    """As many steps of so many seconds as fill the minutes. Warm-up, validation and saving keep their share of the run."""
    steps = max(1, round(60 * minutes / seconds))
    share = steps / settings.steps
    return replace(settings, steps=steps, warmup=min(steps, round(settings.warmup * share)),
                   valid_every=max(1, math.ceil(settings.valid_every * share)),
                   save_every=max(1, math.ceil(settings.save_every * share)))


def _trainer(config: RunConfig, data: Path, tree: Path | None, device: torch.device) -> tuple[Trainer, TrainRows]:
    store = TokenStore(data)
    loaded, _ = tree_of(config, tree, store)
    assembly = assemble(config, loaded, pad_id=store.pad_id, counts=torch.from_numpy(store.counts), device=device)
    compile_backbone(assembly.model, device, None, config.train.memory, config.train.float8)
    rows = TrainRows(store, length=config.data.length, layout=config.data.layout, batch=config.train.batch,
                     seed=config.train.seed)
    return Trainer(assembly.model, assembly.objective, config.train, device), rows


def _seconds(trainer: Trainer, read: Callable[[], Iterable[Batch]], limit: float, timed: int, group: int) -> float:
    """The median over `timed` groups of steps; ends early when more than `limit` seconds have gone."""
    for _ in range(WARM_UP):
        trainer.update(read())
    began, taken = time.perf_counter(), []
    while len(taken) < timed and (not taken or time.perf_counter() - began < limit):
        taken.append(_clock(trainer, [read() for _ in range(group)]))
    return statistics.median(taken)


def _clock(trainer: Trainer, steps: list[Iterable[Batch]]) -> float:
    """Seconds a step of so many steps."""
    _wait(trainer.device)
    started = time.perf_counter()
    for batches in steps:
        trainer.update(batches)
    _wait(trainer.device)
    return (time.perf_counter() - started) / len(steps)


def _micros(trainer: Trainer, rows: TrainRows) -> list[Batch]:
    return [rows.batch(trainer.done, micro=micro, micros=trainer.micros) for micro in range(trainer.micros)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
