"""Complete named runs. Each is a Python value; a variation is `dataclasses.replace`, on the command line `--set`.

`small` and `base` are the paper's. `NAME-small` are its baselines at the same size of network (12 blocks: what their V-wide
head costs the tree method has in 5 more blocks), trained alike: the published table's 131B token positions. The recipes
their own authors used are `mdlm-original` and `sedd-original`, for those who want to repeat those papers.
"""
from __future__ import annotations

from dataclasses import replace

from .config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from .errors import ConfigError
from .model.causal import Causal
from .model.head import Tied
from .objectives.ar import Autoregressive, AutoregressiveTree
from .objectives.gidd import GiddMethod
from .objectives.hdlm import HdlmMethod
from .objectives.joint import JointMethod
from .objectives.mdlm import MdlmMethod
from .objectives.sedd import SeddMethod
from .objectives.tree import TreeMethod
from .objectives.two_step import TwoStepMethod
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

POCKET = RunConfig(
    name="pocket",
    method=TreeMethod(process=Cascade(), head=Tied(), clip=2.0),
    data=DataConfig(length=256, layout="packed"),
    backbone=BackboneConfig(blocks=7, width=384, heads=6, conditioning="level", condition_width=16),
    train=TrainConfig(steps=12_000, batch=256, warmup=400, lr=2e-3, final_lr_ratio=0.05, weight_decay=0.1, ema=0.999,
                      stream="bfloat16", log_every=50, valid_every=1_000, save_every=2_000),
)
"""One GPU, a few minutes of Wikipedia, 8,192 tokens: 15.9M parameters, 32 MB in bf16. models/pocket is it, trained."""

DEMO = RunConfig(
    name="demo",
    method=TreeMethod(process=Cascade(), head=Tied(), clip=2.0),
    data=DataConfig(length=128, layout="packed"),
    backbone=BackboneConfig(blocks=3, width=128, heads=4, conditioning="level"),
    train=TrainConfig(steps=700, batch=32, warmup=50, lr=3e-3, weight_decay=1.0, dtype="float32", log_every=10,
                      valid_every=100, save_every=200),
)
"""Two CPU cores, two minutes, three novels (tuned as written down in docs/lab-notes.md)."""

_TWELVE = BackboneConfig(blocks=12, width=768, heads=12, conditioning="time")
_CAUSAL = Causal(blocks=12, width=768, heads=12)
_AUTHORS = TrainConfig(steps=1_000_000, batch=512, warmup=2_500, lr=3e-4, final_lr_ratio=1.0, weight_decay=0.0,
                       betas=(0.9, 0.999), eps=1e-8, ema=0.9999)
"""What MDLM and SEDD were published with: a constant rate, no decay, averaged weights. (Their dropout of 0.1 is left out.)"""

RIVALS = (
    replace(SMALL, name="mdlm-small", method=MdlmMethod(variant="gidd"), backbone=_TWELVE),
    replace(SMALL, name="two-step-small", method=TwoStepMethod(), backbone=replace(_TWELVE, conditioning="none")),
    replace(SMALL, name="gidd-small", method=GiddMethod(p_uniform=0.0), backbone=_TWELVE),  # their best row; 0.1, 0.2 by --set
    replace(SMALL, name="hdlm-small", method=HdlmMethod(), backbone=_TWELVE),
    replace(SMALL, name="sedd-small", method=SeddMethod(), backbone=_TWELVE),
    replace(SMALL, name="ar-small", method=Autoregressive(), backbone=_CAUSAL),
    replace(SMALL, name="ar-tree-small", method=AutoregressiveTree(), backbone=_CAUSAL),
    replace(SMALL, name="gpt2-small", method=Autoregressive(head=Tied(bias=False)), backbone=replace(_CAUSAL, style="gpt2")),
    replace(SMALL, name="joint-small", method=JointMethod(neighbourhood=16)),  # 2^16 classes: a tree of K=2
    RunConfig("mdlm-original", MdlmMethod(), DataConfig(1024, "packed"), replace(_TWELVE, conditioning="none"), _AUTHORS),
    RunConfig("sedd-original", SeddMethod(), DataConfig(1024, "packed"), _TWELVE, replace(_AUTHORS, steps=400_000)),
)
"""The baselines of the paper's table and the ancestors of the tree head."""

RECIPES: dict[str, RunConfig] = {config.name: config for config in (DEMO, TINY, POCKET, SMALL, BASE, *RIVALS)}


def recipe(name: str) -> RunConfig:
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{suggest(name, RECIPES)}")
    return RECIPES[name]
