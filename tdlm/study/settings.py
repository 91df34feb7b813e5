"""What the runs of the studies share at each size, and the systems that they set side by side.

toy      two narrow blocks, the three novels as bytes, a few hundred steps: shows that everything works, not what is better
budget   one GPU, minutes a run: eight blocks of width 512, packed rows of 512 tokens of your own corpus
full     the paper's settings: its SMALL (or BASE), 512 tokens without packing; ablations with batches of 128
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ..config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from ..model.adaptive import Adaptive
from ..model.causal import Causal
from ..model.head import Tied
from ..objectives.ar import Autoregressive, AutoregressiveTree
from ..objectives.gidd import GiddMethod
from ..objectives.hdlm import HdlmMethod
from ..objectives.joint import JointMethod
from ..objectives.mdlm import MdlmMethod
from ..objectives.sedd import SeddMethod
from ..objectives.tree import TreeMethod
from ..process import Overlapping
from ..recipes import SMALL
from .entry import Entry, Size, TreeOptions

TOY = RunConfig("toy", TreeMethod(), DataConfig(length=32, layout="packed"), BackboneConfig(2, 64, 2, "none"),
                TrainConfig(steps=400, batch=64, lr=4e-3, warmup=20, weight_decay=0.1, dtype="float32", log_every=50,
                            valid_every=80, save_every=400, valid_documents=64))
"""Two narrow blocks and a few hundred steps: shows that everything works together, not what is better."""

BUDGET = RunConfig("budget", TreeMethod(), DataConfig(length=512, layout="packed"), BackboneConfig(8, 512, 8, "time"),
                   TrainConfig(steps=4_000, batch=64, lr=1e-3, warmup=200, stream="bfloat16", log_every=20, valid_every=400,
                               save_every=4_000))
"""One GPU, minutes a run; warm-up, validation and saving are shares of the steps that fit the minutes. A run saves when it ends
or is asked to stop: with the optimizer's moments a checkpoint is a gigabyte."""

ABLATION = replace(SMALL, name="ablation", train=replace(SMALL.train, batch=128))
"""The paper's ablations: SMALL with batches of 128. It does not say for how many steps: the main run's 500,000 are taken."""

MINUTES = 8.0
"""Of a run at budget size."""

BASES: dict[Size, RunConfig] = {"toy": TOY, "budget": BUDGET, "full": ABLATION}

METHODS: dict[str, tuple[Any, str | None, str]] = {
    "tree": (TreeMethod(), "K", "time"),
    "tree-tied": (TreeMethod(head=Tied()), "K", "level"),
    "overlapping-tied": (TreeMethod(process=Overlapping(), head=Tied()), "K", "none"),
    "joint": (JointMethod(neighbourhood=2), "K", "none"),
    "mdlm": (MdlmMethod(), None, "none"),
    "mdlm-tied": (MdlmMethod(head=Tied()), None, "none"),
    "gidd": (GiddMethod(p_uniform=0.0), None, "time"),
    "gidd-uniform": (GiddMethod(p_uniform=0.1), None, "time"),
    "hdlm": (HdlmMethod(), "K", "time"),
    "sedd": (SeddMethod(), None, "time"),
    "sedd-uniform": (SeddMethod(graph="uniform"), None, "time"),
    "ar": (Autoregressive(), None, "causal"),
    "ar-tree": (AutoregressiveTree(), "K", "causal"),
    "ar-adaptive": (Autoregressive(head=Adaptive()), None, "causal"),
}
"""Method, tree and what the network is told, for every system there is."""

SLOW = {"sedd-uniform": 1600}
"""Methods that need more updates than the others before they know more than how often tokens occur."""


def told(base: RunConfig, what: str, *, blocks: int = 0, width: int = 0, heads: int = 0) -> Any:
    """A backbone of the base's size (or another) that is told this, or that reads from left to right ("causal")."""
    old = base.backbone
    blocks, width, heads = blocks or old.blocks, width or old.width, heads or old.heads
    if what == "causal":
        return Causal(blocks=blocks, width=width, heads=heads)
    return BackboneConfig(blocks, width, heads, cast(Any, what))


def minutes_of(size: Size) -> float | None:
    return MINUTES if size == "budget" else None


def ablation(size: Size, name: str, method: Any, tree: TreeOptions | None, facts: Mapping[str, Any]) -> Entry:
    """A run of the paper's kind of ablation: its small network, told the time. At toy size nothing is told."""
    base = BASES[size]
    return Entry(name, replace(base, name=f"{size}-{name}", method=method), tree, minutes_of(size), facts)


def short_toy(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps, valid_every=steps, save_every=steps))
