"""Complete named runs. Each is a Python value; a variation is `dataclasses.replace`, on the command line `--set`."""
from __future__ import annotations

from dataclasses import replace

from .config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from .errors import ConfigError
from .model.head import Tied
from .objectives.tree import TreeMethod
from .process import Cascade
from .registry import suggest

SMALL = RunConfig(
    name="small",
    method=TreeMethod(process=Cascade(), clip=2.0),
    data=DataConfig(length=512, layout="document"),
    backbone=BackboneConfig(blocks=17, width=768, heads=12, conditioning="time"),
    train=TrainConfig(steps=500_000, batch=512, warmup=10_000, lr=5e-4),
)
"""The paper's SMALL: 170M parameters, 131B token positions of OpenWebText."""

BASE = replace(SMALL, name="base", backbone=BackboneConfig(blocks=27, width=1024, heads=16, conditioning="time"))
"""The paper's BASE: 414M parameters."""

TINY = RunConfig(
    name="tiny",
    method=TreeMethod(process=Cascade(), head=Tied(), clip=2.0),
    data=DataConfig(length=512, layout="document"),
    backbone=BackboneConfig(blocks=8, width=512, heads=8, conditioning="level"),
    train=TrainConfig(steps=4_000, batch=64, warmup=200, lr=1e-3, valid_every=500, save_every=500),
)
"""One GPU, a few minutes: level-conditioned, tied to the children's embedding rows."""

DEMO = RunConfig(
    name="demo",
    method=TreeMethod(process=Cascade(), head=Tied(), clip=2.0),
    data=DataConfig(length=128, layout="packed"),
    backbone=BackboneConfig(blocks=3, width=128, heads=4, conditioning="level"),
    train=TrainConfig(steps=700, batch=32, warmup=50, lr=3e-3, weight_decay=1.0, dtype="float32", log_every=10,
                      valid_every=100, save_every=200),
)
"""Two CPU cores, two minutes, three novels (tuned as written down in docs/lab-notes.md)."""

RECIPES: dict[str, RunConfig] = {config.name: config for config in (DEMO, TINY, SMALL, BASE)}


def recipe(name: str) -> RunConfig:
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{suggest(name, RECIPES)}")
    return RECIPES[name]
