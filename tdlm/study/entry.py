"""What a study is: runs by name, the trees they stand on, and the tables and figures that come of them."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..config import RunConfig, override
from ..errors import ConfigError
from ..train.pace import in_minutes

if TYPE_CHECKING:
    from .collect import Collection

Size = Literal["toy", "budget", "full"]
SIZES: tuple[Size, ...] = get_args(Size)
TreeOptions = Mapping[str, Any]
"""Options of `tdlm tree build` by name, for example {"branching": 512}."""

TRIAL = 0.25
"""Every learning rate is tried on so much of a run, by its minutes or by its steps."""


@dataclass(frozen=True)
class Entry:
    """One run. A flat method has no tree. With `minutes` the number of steps is measured where it runs, and the
    configuration's own steps only say which share of a run is warm-up and how often it validates and saves."""

    name: str
    config: RunConfig
    tree: TreeOptions | None = None
    minutes: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What sets it apart in the study's tables: column -> value."""
    rates: tuple[float, ...] = ()
    """Learning rates to be tried first, each in a short run of its own; the one with the lowest validation bound is taken."""
    rate_of: str | None = None
    """Or: the rate that was found for another run of this study."""
    trial_of: str | None = None
    """The run that this short one finds a learning rate for."""

    def trials(self) -> list[Entry]:
        """The short runs, one a rate, with schedules of their own; only their end counts, so they validate and save there."""
        minutes = None if self.minutes is None else TRIAL * self.minutes
        settings = in_minutes(self.config.train, TRIAL * self.config.train.steps / 60, 1.0)
        settings = replace(settings, valid_every=settings.steps, save_every=settings.steps)
        return [replace(self, name=f"{self.name}@{rate:g}", minutes=minutes, rates=(), trial_of=self.name,
                        config=replace(self.config, name=f"{self.config.name}@{rate:g}", train=replace(settings, lr=rate)))
                for rate in self.rates]


@dataclass(frozen=True)
class Wishes:
    """What the user asks of a study beyond its size."""

    minutes: float | None = None
    """For every run that is bounded by minutes."""
    settings: tuple[str, ...] = ()
    """FIELD=VALUE for every run, as of `tdlm train --set`; train.steps also ends the counting of minutes."""
    vectors: tuple[str, ...] = ()
    """Token vectors for further trees (study `trees`)."""
    judge: str | None = None
    """Who reads generated text: as of `tdlm quality --judge`, or the folder of a left-to-right run."""


@dataclass(frozen=True)
class Study:
    """`entries(size)` are the runs, in the order in which they are made; `outcome` writes what is the study's own."""

    name: str
    about: str
    entries: Callable[[Size], list[Entry]]
    outcome: Callable[[Collection], dict[str, Any]] | None = None
    """Tables and figures beside the usual ones; returns what is worth keeping in study.json."""
    needs: str = ""
    """In words, for the list of studies."""
    judged: bool = False
    """Whether a judge reads generated text."""
    with_vectors: Callable[[Size, str], Entry] | None = None
    """A further run for token vectors that the user has."""
    tokenizer: str = "bytes"
    """For the novels, when no data are given (toy size): bytes, so that a few hundred steps are enough to learn from."""

    def runs(self, size: Size, wishes: Wishes = Wishes()) -> list[Entry]:
        """All runs as the user wishes them, those that only find a learning rate before those that use it."""
        entries = self.entries(size)
        if wishes.vectors:
            if self.with_vectors is None:
                raise ConfigError(f"study {self.name} builds no trees from other vectors; --vectors belongs to: tdlm study trees")
            entries = [*entries, *(self.with_vectors(size, name) for name in wishes.vectors)]
        wished = [wish(entry, wishes) for entry in entries]
        runs = [run for entry in wished for run in (*entry.trials(), entry)]
        check_names(runs)
        return runs


def wish(entry: Entry, wishes: Wishes) -> Entry:
    """The entry with the user's settings."""
    config, minutes = entry.config, entry.minutes
    if minutes is not None and wishes.minutes is not None:
        if not 0 < wishes.minutes < 60 * 24 * 60:
            raise ConfigError(f"--minutes must lie between 0 and 86400, got {wishes.minutes}")
        minutes = wishes.minutes
    for item in wishes.settings:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: FIELD=VALUE is expected, for example --set train.batch=32")
        if name == "train.lr" and (entry.rates or entry.rate_of):
            raise ConfigError(f"{entry.name} finds its learning rate by trials; leave out --set {item}")
        if name == "train.steps" and value.isdigit() and int(value) > 0:
            config, minutes = replace(config, train=in_minutes(config.train, int(value) / 60, 1.0)), None
        else:
            config = override(config, name, value)
    return replace(entry, config=config, minutes=minutes)


def vectors_name(vectors: str) -> str:
    """The name of a run whose tree is made from these vectors."""
    return f"vectors-{Path(vectors.removeprefix('hf:')).stem}"


def check_names(entries: Sequence[Entry]) -> None:
    """Two runs of one name (vectors that are given twice) would share a folder; a rate must be found by some run."""
    names = [entry.name for entry in entries]
    twice = {name for name in names if names.count(name) > 1}
    lost = {entry.rate_of for entry in entries if entry.rate_of} - {entry.trial_of for entry in entries}
    if twice or lost:
        raise ConfigError("this study has runs of the same name, or learning rates that no run finds: "
                          f"{', '.join(sorted(map(str, twice | lost)))}; leave one out or rename it")
