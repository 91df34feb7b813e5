"""What a run is: frozen dataclasses, saved as JSON, compared field by field.

`RunConfig.method` is a dataclass registered by the file that owns the method (`objectives/tree.py`: process, head and
weights), `RunConfig.backbone` one registered by a transformer; their types are the dispatch.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConfigError
from .registry import KINDS, from_json, register, suggest, to_json

if TYPE_CHECKING:
    from .model.transformer import Backbone


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True)
class DataConfig:
    """Which rows the model sees."""

    length: int = 512
    layout: Literal["document", "packed"] = "document"

    def __post_init__(self) -> None:
        _require(self.length >= 1, f"data.length must be at least 1, got {self.length}")


@register("dit")
@dataclass(frozen=True)
class BackboneConfig:
    """The diffusion transformer: how deep, how wide, and what it is told besides the node ids. (`model/causal.py` has the
    left-to-right one.)"""

    blocks: int = 12
    width: int = 768
    heads: int = 12
    conditioning: Literal["time", "level", "none"] = "time"
    condition_width: int = 128
    role = "backbone"
    causal = False

    def __post_init__(self) -> None:
        _require(self.blocks >= 1, f"backbone.blocks must be at least 1, got {self.blocks}")
        _require(self.heads >= 1 and self.width % (2 * self.heads) == 0,
                 f"backbone.width must be a multiple of 2 x heads (rotary pairs), got {self.width} and {self.heads} heads")
        _require(self.condition_width >= 1, f"backbone.condition_width must be at least 1, got {self.condition_width}")

    def build(self, nodes: int, levels: int) -> Backbone:
        from .model.transformer import Backbone  # a configuration can be read and compared without torch

        return Backbone(self, nodes, levels)


@dataclass(frozen=True)
class TrainConfig:
    """How the weights are found. The defaults are the paper's recipe."""

    steps: int = 500_000
    batch: int = 512
    micro_batch: int | None = None
    """Sequences that go through the network at once; None means the whole batch of a rank."""
    lr: float = 5e-4
    final_lr_ratio: float = 0.1
    warmup: int = 10_000
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-9
    weight_decay: float = 0.02
    grad_clip: float | None = 1.0
    ema: float | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    stream: Literal["float32", "bfloat16"] = "float32"
    """The residual stream's dtype where dtype is bfloat16: bfloat16 halves what norms and additions move and keep."""
    memory: Literal["fast", "balanced", "lean"] = "fast"
    """How much is kept for the backward pass (docs/training.md)."""
    float8: bool = False
    """Matrix products of the blocks in eight bits, where a GPU has them (docs/training.md)."""
    seed: int = 1
    log_every: int = 10
    valid_every: int = 2_000
    valid_documents: int | None = 256
    save_every: int = 1_000
    keep: int = 2
    """Checkpoints kept, the newest ones."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "valid_every", "save_every", "keep"):
            _require(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        _require(0 <= self.warmup <= self.steps, f"train.warmup must lie in 0..steps={self.steps}, got {self.warmup}")
        _require(self.lr > 0, f"train.lr must be positive, got {self.lr}")
        _require(0 <= self.final_lr_ratio <= 1, f"train.final_lr_ratio must lie in 0..1, got {self.final_lr_ratio}")
        _require(self.grad_clip is None or self.grad_clip > 0, f"train.grad_clip must be positive or none, got {self.grad_clip}")
        _require(self.ema is None or 0 < self.ema < 1, f"train.ema must lie between 0 and 1, got {self.ema}")
        _require(not self.float8 or self.dtype == "bfloat16", "train.float8 needs train.dtype=bfloat16 for all other products")
        _require(self.stream == "float32" or self.dtype == "bfloat16", "train.stream=bfloat16 needs train.dtype=bfloat16")
        _require(self.micro_batch is None or (1 <= self.micro_batch <= self.batch and self.batch % self.micro_batch == 0),
                 f"train.micro_batch must divide train.batch={self.batch}, got {self.micro_batch}")


@dataclass(frozen=True)
class RunConfig:
    name: str
    method: Any
    data: DataConfig = field(default_factory=DataConfig)
    backbone: Any = field(default_factory=BackboneConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        return from_json(cls, data)


def difference(old: Any, new: Any, where: str = "") -> list[str]:
    """The fields in which two configurations (as JSON data) differ, one readable line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for name in dict.fromkeys([*old, *new]):
            lines += difference(old.get(name), new.get(name), f"{where}.{name}" if where else name)
        return lines
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def override(config: RunConfig, path: str, text: str) -> RunConfig:
    """The configuration with one field replaced, from the command line's `--set train.lr=3e-4`.

    A registered part is named by its kind (`--set method.head=tied`), then its own fields can be set.
    """
    return overrides(config, [(path, text)])


def overrides(config: RunConfig, settings: Iterable[tuple[str, str]]) -> RunConfig:
    """Several fields at once: neighbours that must fit together (width and heads) may be named in any order."""
    return _replace(config, [(path.split("."), text, path) for path, text in settings])


def _replace(value: Any, settings: list[tuple[list[str], str, str]]) -> Any:
    """Each setting is the way that is left to it, what was typed, and the whole way for messages."""
    if not dataclasses.is_dataclass(value):
        parts, _, path = settings[0]
        raise ConfigError(f"--set {path}: {parts[0]!r} lies below a plain value")
    names = [item.name for item in dataclasses.fields(value)]
    changed: dict[str, Any] = {}
    # a run of settings below the same field, then the field itself, and so on: a part that is named anew begins anew
    for (name, below), group in itertools.groupby(sorted(settings, key=lambda item: item[0][0]),
                                                  key=lambda item: (item[0][0], len(item[0]) > 1)):
        run = list(group)
        if name not in names:
            raise ConfigError(f"--set {run[0][2]}: no setting {name!r}{suggest(name, names)}")
        old = changed.get(name, getattr(value, name))
        if below:
            changed[name] = _replace(old, [(parts[1:], text, path) for parts, text, path in run])
            continue
        for _, text, path in run:
            changed[name] = _named(old, text, path) if hasattr(type(old), "kind") else \
                _parse(typing.get_type_hints(type(value))[name], text, f"--set {path}")
    return dataclasses.replace(typing.cast(Any, value), **changed)


def _named(old: Any, text: str, path: str) -> Any:
    """Another part in the place of `old`: it must play the same role."""
    new = from_json(Any, {"kind": text}, f"--set {path}")
    role = getattr(type(old), "role", None)
    if getattr(type(new), "role", None) != role:
        fitting = [kind for kind, cls in KINDS.items() if getattr(cls, "role", None) == role]
        raise ConfigError(f"--set {path}: {text!r} is no {role}{suggest(text, fitting)}")
    return new


def _parse(expected: Any, text: str, where: str) -> Any:
    """A value of the annotated type from what was typed."""
    candidates: list[Any] = []
    lowered = text.strip().lower()
    if lowered in ("none", "null"):
        candidates.append(None)
    if lowered in ("true", "false"):
        candidates.append(lowered == "true")
    candidates += _numbers(text.replace("_", ""))
    parts = [_numbers(item)[:1] for item in text.strip("()[] ").split(",") if item.strip()]
    if parts and all(parts):  # one number is a list of one, where a list is wanted
        candidates.append([part[0] for part in parts])
    candidates.append(text)
    failure = None
    for candidate in candidates:
        try:
            return from_json(expected, candidate, where)
        except ConfigError as error:
            failure = failure or error if candidate is not text else error
    raise failure or ConfigError(f"{where}: cannot read {text!r}")


def _numbers(text: str) -> list[int | float]:
    """What the text says as a whole number and as a number, where it says one. (No setting is infinite.)"""
    found: list[int | float] = []
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            found.append(kind(text))
    return [value for value in found if not isinstance(value, float) or math.isfinite(value)]
