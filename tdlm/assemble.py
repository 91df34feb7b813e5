"""The one place where a configuration and a tree become a network and an objective."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import RunConfig
from .errors import ConfigError
from .model.model import Model
from .model.transformer import Backbone
from .objectives.tree import TreeObjective
from .rng import key
from .tree.tree import Tree


@dataclass(frozen=True)
class Assembly:
    model: Model
    objective: TreeObjective


def assemble(config: RunConfig, tree: Tree, *, pad_id: int | None, counts: Tensor | None = None,
             device: torch.device | str = "cpu") -> Assembly:
    """Network (initialised from the run's seed) and objective on `device`. `counts` (V,) are token counts of the
    training split; heads that start at the unigram model use them."""
    process = config.method.process
    if config.backbone.conditioning == "level" and not process.knows_level:
        raise ConfigError(f"backbone.conditioning=level needs a process with one level at a time; "
                          f"{process.kind} shows several at once: use time or none")
    mass = None if counts is None else tree.mass(counts.double() + 0.5)
    with torch.random.fork_rng(devices=[]):  # the global generator stays as it was
        torch.manual_seed(key("init", config.train.seed))
        backbone = Backbone(config.backbone, tree.nodes, tree.height)
        head = config.method.head.build(tree, backbone.embedding, mass)
    model = Model(backbone, head).to(device)
    return Assembly(model, config.method.objective(tree.to(device), pad_id))
