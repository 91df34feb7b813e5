"""What a run will cost, before it starts: `tdlm train RECIPE --dry-run`. Needs neither data nor a tree.

The modules themselves are built on torch's `meta` device and counted; nothing is computed. Per token position, with S
positions, d the width, L blocks, K children and W the weights of every matrix that meets each position (the blocks
without their modulation, which acts once per sequence),

    forward = 2 W + 4 S d L + 2 d K          matrix products, attention (scores and values), head at every position
    train   = 3 forward                      the backward pass costs two forwards; recomputation is not counted

The head's term is an upper bound: a position that shows its token already needs no head. A left-to-right method goes down
the whole tree at every position: H K instead of K. Causal attention is counted in full, as is usual. A head with another
number of logits than K says so itself (`classes`: V for a dense head), one with another cost than one matrix too (`flops`,
per position).

Memory: `memory.py`.
"""
from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from ..assemble import assemble
from ..config import RunConfig
from ..errors import ConfigError
from ..model.model import Model, count_parameters
from ..tree.tree import Tree
from .card import CARDS, GIB, choose, largest
from .memory import Predictor, classes, predictor
from .metrics import CHIPS

ASSUMED_MFU = 0.4
"""Share of a chip's peak that the time estimate assumes; measure your own and scale."""


def plan(config: RunConfig, *, vocabulary: int = 50_258, branching: int = 512, tree: Tree | None = None,
         fused: bool | None = None) -> dict[str, Any]:
    """Parameters, FLOPs, memory and time of a run, as plain JSON data; see the top of the file for the formulas.

    Without a tree the sizes are those of a complete one for `vocabulary` tokens (PAD included) with `branching`
    children a node. The default is the GPT-2 vocabulary and PAD. `fused` False: memory without fused blocks.
    """
    known = tree is not None
    tree = sized_tree(config, vocabulary, branching) if tree is None else tree
    model = meta_model(config, tree)
    return {
        "name": config.name,
        "tree": {"source": "file" if known else "complete sizes", "tokens": tree.size, "branching": tree.branching,
                 "height": tree.height, "internal_nodes": tree.nodes - tree.size, "nodes": tree.nodes,
                 "embedding_rows": model.backbone.embedding.num_embeddings},
        "parameters": count_parameters(model),
        "flops_per_token": train_flops(model, config, tree.height),
        **_budget(config, model, tree, fused),
        "config": config.to_json(),
    }


def _budget(config: RunConfig, model: Model, tree: Tree, fused: bool | None) -> dict[str, Any]:
    settings, length = config.train, config.data.length
    micro = settings.micro_batch or settings.batch
    tokens = settings.steps * settings.batch * length
    flops = train_flops(model, config, tree.height)["train"]
    predict = predictor(config, model, tree.height, fused)
    value = 2 if settings.dtype == "bfloat16" else 4
    return {
        "training": {"steps": settings.steps, "batch": settings.batch, "length": length, "token_positions": tokens,
                     "flops": tokens * flops},
        "memory": predict(micro),
        "logits": {"micro_batch": micro, "bytes_per_value": value, "tree": micro * length * classes(model) * value,
                   "dense": micro * length * tree.size * value, "ratio": tree.size / classes(model)},
        "time": {"assumed_mfu": ASSUMED_MFU, "chips": [_chip(settings.batch, predict, flops, tokens, *chip) for chip in CHIPS]},
        "cards": [_card(config, model, size, tree.height, fused) for size in CARDS],
    }


def _chip(batch: int, predict: Predictor, flops: int, tokens: int, name: str, teraflops: float,
          gigabytes: float) -> dict[str, Any]:
    """Time on one chip, and how many sequences its memory takes at once (a tenth is left for the rest)."""
    speed = ASSUMED_MFU * teraflops * 1e12 / flops
    return {"chip": name, "peak_tflops": teraflops, "memory_gb": gigabytes, "tokens_per_second": round(speed),
            "hours": round(tokens / speed / 3600, 4), "largest_micro_batch": largest(predict, batch, gigabytes * 1e9)}


def _card(config: RunConfig, model: Model, size: int, height: int, fused: bool | None) -> dict[str, Any]:
    """What `--card` would choose."""
    choice = choose(config, model, size * GIB, height, fused)
    if choice is None:
        return {"gib": size, "micro_batch": None, "memory": None, "predicted": None}
    return {"gib": size, "micro_batch": choice.memory["micro_batch"], "memory": choice.config.train.memory,
            "predicted": choice.memory["total"]}


def sized_tree(config: RunConfig, vocabulary: int, branching: int) -> Tree:
    return Tree.star(vocabulary) if config.method.flat else complete_tree(vocabulary, branching)


def meta_model(config: RunConfig, tree: Tree) -> Model:
    """The real modules without their numbers."""
    with torch.device("meta"):
        return assemble(config, tree, pad_id=None, device="meta").model


def complete_tree(vocabulary: int, branching: int) -> Tree:
    """The tree whose splits are as even as they can be, over the token ids in order: right sizes, no meaning."""
    if vocabulary < 2 or branching < 2:
        raise ConfigError(f"a tree needs at least 2 tokens and 2 children a node, got {vocabulary} and {branching}")

    def split(start: int, size: int) -> Any:
        if size == 1:
            return start
        parts = min(branching, size)
        edges = [start + size * k // parts for k in range(parts + 1)]
        return [split(low, high - low) for low, high in itertools.pairwise(edges)]

    return Tree.from_nested(split(0, vocabulary), size=vocabulary, branching=branching)


def matrix_weights(model: Model) -> int:
    """Weights of the matrices that every position passes through (W above)."""
    return sum(linear.weight.numel() for block in model.backbone.blocks for name, linear in block.named_modules()
               if isinstance(linear, nn.Linear) and "modulation" not in name)


def levels_scored(config: RunConfig, height: int) -> int:
    """How many nodes' children are scored per position."""
    return height if config.method.causal else 1


def train_flops(model: Model, config: RunConfig, height: int = 1) -> dict[str, Any]:
    """FLOPs per token position, forward and for a training step; a left-to-right method needs the tree's height."""
    width, length = model.backbone.width, config.data.length
    head = getattr(model.head, "flops", 2 * width * classes(model))
    parts = {"matrices": 2 * matrix_weights(model), "attention": 4 * length * width * len(model.backbone.blocks),
             "head": head * levels_scored(config, height)}
    forward = sum(parts.values())
    return {**parts, "forward": forward, "train": 3 * forward,
            "formula": "forward = 2 W + 4 S d L + 2 d K; train = 3 forward (docs/training.md)"}
