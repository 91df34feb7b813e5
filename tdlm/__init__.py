"""Tree-structured diffusion language models: build a tree over a vocabulary, train, bound, sample, compare.

The names below are loaded when they are first used, so `import tdlm` costs next to nothing.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "RunConfig": "config", "DataConfig": "config", "BackboneConfig": "config", "TrainConfig": "config",
    "recipe": "recipes", "RECIPES": "recipes",
    "Tokenizer": "data.tokenizer", "prepare": "data.prepare", "TokenStore": "data.store",
    "Tree": "tree.tree", "build_tree": "tree.build",
    "Cascade": "process.cascade", "Overlapping": "process.overlapping",
    "TreeMethod": "objectives.tree", "Draws": "rng",
    "plan": "train.plan", "generate": "sample.generate", "evaluate_bound": "evaluate.likelihood",
    "open_run": "train.run", "Request": "verbs.sample", "sample_run": "verbs.sample", "write_report": "report",
    "compare_runs": "report", "TdlmError": "errors",
}
__all__ = ["__version__", *_WHERE]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from .config import BackboneConfig as BackboneConfig
    from .config import DataConfig as DataConfig
    from .config import RunConfig as RunConfig
    from .config import TrainConfig as TrainConfig


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tdlm' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
