"""Counter-based random numbers: every draw is a pure function of (seed, step, purpose, sample, position).

Nothing is stateful, so a resumed run needs no generator state, any number of ranks or micro-batches draws the same
noise for the same sample, and the CPU and the GPU draw the same numbers. The generator is a SplitMix64 stream per row
whose start is a hash of the row's counter and the key; it needs 64-bit integer arithmetic only, which wraps around in
torch as it does in C.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in; a hash wants zeros


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def key(*parts: int | str) -> int:
    """A 64-bit key for a tuple of numbers and names, the same on every machine."""
    return _signed(xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode()))


def words(rows: Tensor, columns: int, *parts: int | str) -> Tensor:
    """Random 64-bit words (len(rows), columns): row r depends on rows[r] and the key parts, not on its neighbours."""
    start = _mix(rows.to(torch.int64) * _GOLDEN + key(*parts))
    column = torch.arange(1, columns + 1, device=rows.device, dtype=torch.int64)
    return _mix(start[:, None] + column * _GOLDEN)


def to_uniform(bits: Tensor) -> Tensor:
    """64-bit words to float64 in the open interval (0, 1), 53 bits each."""
    points = (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    return points.clamp(max=1 - 2.0**-53)  # the last of them rounds to 1, behind the end of every distribution


def shuffle(size: int, *parts: int | str) -> Tensor:
    """A permutation of 0..size-1 that is a function of the key (hashes are sorted; ties are broken by position)."""
    return torch.argsort(words(torch.arange(size), 1, "shuffle", *parts)[:, 0], stable=True)


def permuted(index: Tensor, size: int, *parts: int | str) -> Tensor:
    """Where a keyed permutation of 0..size-1 sends `index`, without ever making the permutation.

    A four-round Feistel network on the next even number of bits, walked until it falls inside the range: constant
    memory for any number of documents.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    round_keys = [key("permuted", number, *parts) for number in range(4)]

    def once(x: Tensor) -> Tensor:
        left, right = x >> half, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right * _GOLDEN + round_key) & mask)
        return (left << half) | right

    x = once(index.to(torch.int64))
    while bool((outside := x >= size).any()):
        x = torch.where(outside, once(x), x)
    return x


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On `device`; from the processor to a GPU through page-locked memory, so that nobody waits."""
    if device.type == "cuda" and not values.is_cuda and values.numel():
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class Draws:
    """The random numbers of some rows of one step: `rows` are sample numbers within the step's global batch of `total`.

    They are made where `rows` lies and handed out on `device` (the same place unless said). A training step on a GPU makes
    them on the processor while the GPU is busy with the step before: dozens of tiny kernels less, and no waiting.
    """

    def __init__(self, seed: int, step: int, purpose: str, rows: Tensor, total: int | None = None,
                 device: torch.device | None = None):
        self.parts = (seed, step, purpose)
        self.rows = rows
        self.total = int(total if total is not None else len(rows))
        self.device = rows.device if device is None else device

    def uniform(self, tag: str, *shape: int) -> Tensor:
        """Independent uniforms (len(rows), *shape) in (0, 1), float64."""
        count = 1
        for size in shape:
            count *= size
        return self._sent(to_uniform(words(self.rows, count, *self.parts, tag)).view(len(self.rows), *shape))

    def uniforms(self, tags: Sequence[str], columns: int) -> Tensor:
        """`uniform` of each tag, (tags, rows, columns), made at once."""
        column = torch.arange(1, columns + 1, device=self.rows.device)
        return self._sent(to_uniform(_mix(self._starts(tags)[..., None] + column * _GOLDEN)))

    def single(self, tags: Sequence[str], tag: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Single numbers: of tags[tag] in the given row (counted from 0) and column."""
        return self._sent(to_uniform(_mix(self._starts(tags)[tag, row] + (column + 1) * _GOLDEN)))

    def _starts(self, tags: Sequence[str]) -> Tensor:
        keys = torch.tensor([key(*self.parts, tag) for tag in tags], device=self.rows.device)
        return _mix(self.rows.to(torch.int64) * _GOLDEN + keys[:, None])

    def strata(self, tag: str) -> Tensor:
        """One uniform a row, evenly spaced over the *global* batch: (permutation(row) + U) / total with a common U.

        Every interval of length at least 1/total holds at least one of the `total` points, and each row alone is
        uniform, so an average over the batch stays unbiased.
        """
        order = shuffle(self.total, *self.parts, tag).to(self.rows.device)
        shift = to_uniform(words(torch.zeros(1, dtype=torch.int64, device=self.rows.device), 1, *self.parts, tag, "U"))
        # a product, not a quotient: a GPU divides by a scalar through its reciprocal, and devices must agree to the bit
        points = (order[self.rows % self.total].to(torch.float64) + shift[0, 0]) * (1.0 / self.total)
        return self._sent(points.clamp(max=1 - 2.0**-53))  # the last point may round to 1, where a chain has no finite time

    def _sent(self, numbers: Tensor) -> Tensor:
        return sent(numbers, self.device)

    def here(self) -> "Draws":
        """The same numbers, handed out where they are made."""
        seed, step, purpose = self.parts
        return Draws(seed, step, purpose, self.rows, self.total)

    def part(self, chosen: slice | Tensor) -> "Draws":
        """The same numbers for some of the rows."""
        seed, step, purpose = self.parts
        return Draws(seed, step, purpose, self.rows[chosen], self.total, self.device)
