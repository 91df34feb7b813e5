"""The one place where a configuration and a tree become a network and an objective."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import RunConfig
from .errors import ConfigError
from .model.model import Model
from .objectives.base import Objective
from .rng import key
from .tree.tree import Tree


@dataclass(frozen=True)
class Assembly:
    model: Model
    objective: Objective


def assemble(config: RunConfig, tree: Tree, *, pad_id: int | None, counts: Tensor | None = None,
             device: torch.device | str = "cpu") -> Assembly:
    """Network (initialised from the run's seed) and objective on `device`. `counts` (V,) are token counts of the
    training split; heads that start at the unigram model use them."""
    method, objective = config.method, config.method.objective(tree.to(device), pad_id)
    if method.causal != config.backbone.causal:
        needed = "a left-to-right backbone: --set backbone=causal" if method.causal else "a backbone that looks both ways"
        raise ConfigError(f"method {method.kind} needs {needed}; the run has backbone={config.backbone.kind}")
    if getattr(config.backbone, "conditioning", "none") == "level" and not objective.knows_level:
        raise ConfigError("backbone.conditioning=level needs a process with one level at a time; this one shows several "
                          "at once: use time or none")
    mass = None if counts is None else tree.mass(counts.double() + 0.5)
    with torch.random.fork_rng(devices=[]):  # the global generator stays as it was
        torch.manual_seed(key("init", config.train.seed))
        backbone = config.backbone.build(objective.num_states, tree.height)
        head = method.head.build(tree, backbone.embedding, mass)
    backbone.stream = getattr(torch, config.train.stream)
    longest = getattr(backbone, "longest", None)
    if longest is not None and longest < config.data.length:
        raise ConfigError(f"backbone.longest={longest} is shorter than data.length={config.data.length}; "
                          f"--set backbone.longest={config.data.length}, or a backbone without a table of positions")
    return Assembly(Model(backbone, head).to(device), objective)
