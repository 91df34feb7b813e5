"""What a study is: runs by name, and the trees they stand on."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import RunConfig

Size = Literal["toy", "full"]


@dataclass(frozen=True)
class Entry:
    """One run. `tree` names one of the study's trees; a flat method has none."""

    name: str
    config: RunConfig
    tree: str | None = None


@dataclass(frozen=True)
class Study:
    """`entries(size)` are the runs, in the order in which they are made; `trees` are options of `tdlm tree build`."""

    name: str
    about: str
    entries: Callable[[Size], list[Entry]]
    trees: dict[Size, dict[str, dict[str, Any]]] = field(default_factory=dict)
    tokenizer: str = "bytes"
    """For the novels, when no data are given (toy size): bytes, so that a few hundred steps are enough to learn from."""
