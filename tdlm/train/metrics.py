"""What a run tells: one line of progress for people, one JSON object per line for programs.

Plain lines are ASCII and go to stderr, so that stdout stays free for results; in a terminal rich keeps one live line.
"""
from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from ..errors import RunError
from ..files import sync, write_bytes

PLAIN_SECONDS = 10.0
"""Without a terminal a line is printed at most this often (validation and the last step always)."""

CHIPS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250, 180), ("GH200", 989, 96), ("H200", 989, 141), ("H100 PCIe", 756, 80), ("H100", 989, 80),
    ("A100", 312, 80), ("L40S", 362, 48), ("A6000", 155, 48), ("RTX 4090", 165, 24), ("RTX 3090", 71, 24),
    ("L4", 121, 24), ("T4", 65, 16))
"""Name within the driver's (first match counts), dense bf16 TFLOP/s (T4: fp16), GB of memory: the vendors' figures."""


def peak_flops(device: str) -> float | None:
    """bf16 FLOP/s of a chip by its name, None when it is not known."""
    for name, teraflops, _ in CHIPS:
        if re.search(rf"\b{name}\b", device, re.IGNORECASE):
            return teraflops * 1e12
    return None


def memory(device: torch.device) -> int:
    """Peak bytes: what torch took from the accelerator (as predicted by `memory.py`), or the process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    import resource  # not on every platform

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def number(value: float) -> float | None:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else None


class MetricsFile:
    """`metrics.jsonl`, flushed line by line; `sync` makes it durable before a checkpoint refers to it."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()

    def sync(self) -> None:
        self.file.flush()
        sync(self.path)

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    return [record for _, record in _records(path)]


def _records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    found = []
    for i, line in enumerate(lines[:-1]):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, KeyError, TypeError):
            if i >= len(lines) - 2:
                break
            raise RunError(f"{path} line {i + 1} is no record; repair or remove that line") from None
        found.append((line, record))
    return found


def truncate(path: Path, step: int) -> None:
    """Forget everything after a checkpoint's step: those steps will be done, and written, again."""
    if path.exists():
        kept = [line + b"\n" for line, record in _records(path) if record["step"] <= step]
        write_bytes(path, b"".join(kept))


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def count(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{letter}" if value < 100 * limit else f"{value / limit:.0f}{letter}"
    return f"{value:.0f}"


def levels_text(levels: list[float | None]) -> str:
    """The bound by level, the root's first: the order in which a text is made. A tall tree shows its ends."""
    shown = ["-" if value is None else f"{value:.2f}" for value in reversed(levels)]
    return "+".join(shown if len(shown) <= 4 else [shown[0], shown[1], "..", shown[-1]])


def line(record: dict[str, Any], steps: int, *, utilisation: float | None, remaining: float) -> str:
    """One line for one training record."""
    width = len(str(steps))
    bound = "-" if record["bound"] is None else f"{record['bound']:.3f}"
    return (f"step {record['step']:>{width}}/{steps}  loss {record['loss']:.3f}  bound {bound} "
            f"({levels_text(record['levels'])})  {count(record['tokens_per_second'])} tok/s  "
            f"MFU {'-' if utilisation is None else f'{100 * utilisation:.0f}%'}  "
            f"{record['memory'] / 2**30:.1f} GiB  ETA {duration(remaining)}")


class Progress:
    """Plain lines at a sensible cadence; see `progress()` for the one that fits the stream."""

    def __init__(self, stream: TextIO, seconds: float = PLAIN_SECONDS):
        self.stream = stream
        self.seconds = seconds
        self.printed = -math.inf

    def note(self, text: str) -> None:
        """A line that stays."""
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)

    def update(self, text: str, done: int, total: int) -> None:
        """The line of the moment."""
        now = time.monotonic()
        if done >= total or now - self.printed >= self.seconds:
            self.printed = now
            self.note(text)

    def close(self) -> None:
        """Leave the terminal as it was."""


class Quiet(Progress):
    """Says nothing (benchmarks, tests)."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    def note(self, text: str) -> None:
        pass


class Live(Progress):
    """A terminal: one line that rewrites itself under a bar."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(BarColumn(bar_width=20), TextColumn("{task.description}", markup=False),
                       console=Console(file=stream, highlight=False), transient=False)
        self.task: Any = None

    def note(self, text: str) -> None:
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        self.bar.console.print(text.encode(encoding, "replace").decode(encoding), markup=False)

    def update(self, text: str, done: int, total: int) -> None:
        if self.task is None:
            self.bar.start()
            self.task = self.bar.add_task(text, total=total)
        self.bar.update(self.task, description=text, completed=done)

    def close(self) -> None:
        if self.task is not None:
            self.bar.stop()
            self.task = None


def progress(stream: TextIO | None = None) -> Progress:
    """The progress display that fits where the text goes."""
    stream = sys.stderr if stream is None else stream
    if stream is None:  # a process without stderr
        return Quiet()
    return Live(stream) if stream.isatty() else Progress(stream)
