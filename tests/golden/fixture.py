"""Numbers that the rivals' own code produced, read from tests/fixtures/golden, and the account of what was compared.

A golden test reads every array through `Golden`, which remembers what was read. At the end of its file stands one test
that calls `account`: every array of the group is either compared or named, by a pattern, with the reason why not.
"""
from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "fixtures" / "golden"


class Golden:
    """One .npz file; `golden[name]` is a float64 or int64 tensor."""

    def __init__(self, name: str):
        self.file = np.load(FOLDER / f"{name}.npz", allow_pickle=False)
        self.names = list(self.file.files)

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.file[name]))

    def __contains__(self, name: str) -> bool:
        return name in self.file

    def matching(self, pattern: str) -> list[str]:
        found = [name for name in self.names if fnmatch(name, pattern)]
        assert found, f"no array matches {pattern}"
        return found

    def account(self, compared: list[str], inputs: list[str], left_out: dict[str, str]) -> None:
        """Every array falls under exactly one heading (patterns of fnmatch); no pattern is idle."""
        headings = [*compared, *inputs, *left_out]
        for pattern in headings:
            self.matching(pattern)
        for name in self.names:
            groups = [any(fnmatch(name, p) for p in group) for group in (compared, inputs, left_out)]
            assert sum(groups) == 1, f"{name} is accounted for {sum(groups)} times"
        assert all(reason for reason in left_out.values())


def gpt2_logits(rows: int, columns: int, salt: int, targets: Tensor) -> Tensor:
    """The logits of the `gpt2` groups, which are not stored: a hash of (row, column, salt), +6 at the target of even rows."""
    word = (1 << 32) - 1
    i, j = np.arange(rows, dtype=np.uint64)[:, None], np.arange(columns, dtype=np.uint64)[None]
    h = (i * np.uint64(1000003) + j + np.uint64(7919 * salt)) & np.uint64(word)
    h = (h * np.uint64(2654435761)) & np.uint64(word)
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(2246822519)) & np.uint64(word)
    h ^= h >> np.uint64(13)
    logits = 8 * (torch.from_numpy(h.astype(np.float64)) / 2**32 - 0.5)
    even = torch.arange(0, rows, 2)
    logits[even, targets[even]] += 6
    return logits
