"""What may be asked of a tree, and what arithmetic alone rules out before any work."""
from __future__ import annotations

import math
from typing import Literal

from ..errors import TreeError

Method = Literal["kmeans", "exchange", "random", "frequency", "hdlm"]
METHODS: tuple[Method, ...] = ("kmeans", "exchange", "random", "frequency", "hdlm")
VECTORIAL = ("kmeans", "exchange", "hdlm")
"""Methods that look at token vectors."""


def lowest_height(size: int, branching: int) -> int:
    """The least H with K^H >= V."""
    height = 1
    while branching**height < size:
        height += 1
    return height


def needed(size: int, height: int) -> int:
    """The least K with K^height >= size."""
    k = max(2, round(size ** (1 / height)) - 1)
    while k**height < size:
        k += 1
    while k > 2 and (k - 1) ** height >= size:
        k -= 1
    return k


def check_request(size: int, *, branching: int, min_ratio: float, max_ratio: float, height: int | None, max_depth: int,
                  complete: bool, method: str, max_mass: float | None = None, counted: bool = True) -> None:
    """Fail before any work when the arithmetic alone says that the request cannot be met."""
    if size < 2:
        raise TreeError(f"a tree needs at least 2 tokens, got {size}")
    if branching < 2:
        raise TreeError(f"the branching factor must be at least 2, got {branching}")
    if not 0 <= min_ratio <= 1 <= max_ratio < math.inf:
        raise TreeError(f"ratios must satisfy 0 <= min <= 1 <= max, got {min_ratio} and {max_ratio}")
    if max_depth < 1 or (height is not None and not 1 <= height <= max_depth):
        raise TreeError(f"the height must lie between 1 and --max-depth, got height {height}, max depth {max_depth}")
    if method not in METHODS:
        raise TreeError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if max_mass is not None and not (2 <= max_mass < math.inf and counted and method in ("kmeans", "exchange")):
        raise TreeError("a bound on the share of the text is at least 2 times the mean, for kmeans or exchange with --data; "
                        f"got {max_mass} for {method}")
    k = branching
    if not complete and height is None:
        height = lowest_height(size, k)
    allowed = height if height is not None else max_depth
    if k**allowed < size:
        raise TreeError(f"{size} tokens do not fit a tree of K={k} and {allowed} levels ({k}^{allowed} = {k**allowed}); "
                        f"use K >= {needed(size, allowed)}, or {lowest_height(size, k)} levels or more")
    if not complete and height is not None and (k < 3 or 2**height > size):
        raise TreeError(f"no tree of K={k} over {size} tokens has {height} real choices on every path; allow padding "
                        "(--complete), or use K >= 3 and fewer levels")
    if height is not None and method == "hdlm":
        raise TreeError("the reference routine cannot keep to a height (its sizes are not enforced); leave out --height and "
                        "--no-complete, or use --method kmeans")
