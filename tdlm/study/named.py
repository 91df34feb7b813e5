"""The studies that come with the package."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from ..errors import ConfigError
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
from ..recipes import recipe
from ..registry import suggest
from .entry import Entry, Size, Study

TOY = RunConfig("toy", TreeMethod(), DataConfig(length=32, layout="packed"), BackboneConfig(2, 64, 2, "none"),
                TrainConfig(steps=400, batch=64, lr=4e-3, warmup=20, weight_decay=0.1, dtype="float32", log_every=50,
                            valid_every=400, save_every=400, valid_documents=64))
"""Two narrow blocks and a few hundred steps: shows that everything works together, not what is better."""

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


def _rivals(size: Size) -> list[Entry]:
    if size == "full":
        names = ("small", "mdlm-small", "gidd-small", "hdlm-small", "sedd-small", "ar-small", "ar-tree-small", "gpt2-small")
        return [Entry(name, recipe(name), None if recipe(name).method.flat else "K") for name in names]
    return [Entry(name, _toy(name, method, told), tree) for name, (method, tree, told) in METHODS.items()]


def _toy(name: str, method: Any, told: str) -> RunConfig:
    backbone = Causal(blocks=2, width=64, heads=2) if told == "causal" else replace(TOY.backbone, conditioning=told)
    steps = SLOW.get(name, TOY.train.steps)
    settings = replace(TOY.train, steps=steps, valid_every=steps, save_every=steps)
    return replace(TOY, name=f"toy-{name}", method=method, backbone=backbone, train=settings)


RIVALS = Study(
    "rivals", "Every system of the paper and its ancestors: the bound of each on the same tokens.", _rivals,
    trees={"toy": {"K": {"branching": 17, "height": 2}}, "full": {"K": {"branching": 512}}})

STUDIES: dict[str, Study] = {found.name: found for found in (RIVALS,)}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}{suggest(name, STUDIES)}")
    return STUDIES[name]


__all__ = ["METHODS", "RIVALS", "STUDIES", "TOY", "study"]
