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

Memory is that of training without torch.compile: float32 weights, gradients and two moments, plus what autograd keeps
for the backward pass, found by running the real backbone on fake tensors (shapes and dtypes only), plus the logits.
"""
from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ..assemble import assemble
from ..config import RunConfig
from ..errors import ConfigError
from ..model.model import Model, autocast, count_parameters
from ..tree.tree import Tree
from .metrics import CHIPS

ASSUMED_MFU = 0.4
"""Share of a chip's peak that the time estimate assumes; measure your own and scale."""
LOGIT_BYTES = 12
"""Kept per logit of the head: float32 masked logits and their softmax, and the gradient while it is formed."""


def plan(config: RunConfig, *, vocabulary: int = 50_258, branching: int = 512,
         tree: Tree | None = None) -> dict[str, Any]:
    """Parameters, FLOPs, memory and time of a run, as plain JSON data; see the top of the file for the formulas.

    Without a tree the sizes are those of a complete one for `vocabulary` tokens (PAD included) with `branching`
    children a node. The default is the GPT-2 vocabulary and PAD.
    """
    known = tree is not None
    if tree is None:
        tree = Tree.star(vocabulary) if config.method.flat else complete_tree(vocabulary, branching)
    model = meta_model(config, tree)
    return {
        "name": config.name,
        "tree": {"source": "file" if known else "complete sizes", "tokens": tree.size, "branching": tree.branching,
                 "height": tree.height, "internal_nodes": tree.nodes - tree.size, "nodes": tree.nodes,
                 "embedding_rows": model.backbone.embedding.num_embeddings},
        "parameters": count_parameters(model),
        "flops_per_token": train_flops(model, config, tree.height),
        **_budget(config, model, tree),
        "config": config.to_json(),
    }


def _budget(config: RunConfig, model: Model, tree: Tree) -> dict[str, Any]:
    settings, length = config.train, config.data.length
    micro = settings.micro_batch or settings.batch
    tokens = settings.steps * settings.batch * length
    flops = train_flops(model, config, tree.height)["train"]
    memory = predicted_memory(config, model, micro, tree.height)
    value = 2 if settings.dtype == "bfloat16" else 4
    return {
        "training": {"steps": settings.steps, "batch": settings.batch, "length": length, "token_positions": tokens,
                     "flops": tokens * flops},
        "memory": memory,
        "logits": {"micro_batch": micro, "bytes_per_value": value, "tree": micro * length * classes(model) * value,
                   "dense": micro * length * tree.size * value, "ratio": tree.size / classes(model)},
        "time": {"assumed_mfu": ASSUMED_MFU, "chips": [_chip(config, memory, flops, tokens, *chip) for chip in CHIPS]},
    }


def _chip(config: RunConfig, memory: dict[str, Any], flops: int, tokens: int, name: str, teraflops: float,
          gigabytes: float) -> dict[str, Any]:
    """Time on one chip, and how many sequences its memory takes at once (a tenth is left for the rest)."""
    speed = ASSUMED_MFU * teraflops * 1e12 / flops
    room = int((0.9 * gigabytes * 1e9 - memory["fixed"]) // memory["per_sequence"])
    batch = config.train.batch
    fits = max((size for size in range(1, batch + 1) if batch % size == 0 and size <= room), default=None)
    return {"chip": name, "peak_tflops": teraflops, "memory_gb": gigabytes, "tokens_per_second": round(speed),
            "hours": round(tokens / speed / 3600, 4), "largest_micro_batch": fits}


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


def classes(model: Model) -> int:
    """Logits of a scored position (K above)."""
    return getattr(model.head, "classes", model.head.branching)  # type: ignore[attr-defined]


def train_flops(model: Model, config: RunConfig, height: int = 1) -> dict[str, Any]:
    """FLOPs per token position, forward and for a training step; a left-to-right method needs the tree's height."""
    width, length = model.backbone.width, config.data.length
    head = getattr(model.head, "flops", 2 * width * classes(model))
    parts = {"matrices": 2 * matrix_weights(model), "attention": 4 * length * width * len(model.backbone.blocks),
             "head": head * levels_scored(config, height)}
    forward = sum(parts.values())
    return {**parts, "forward": forward, "train": 3 * forward,
            "formula": "forward = 2 W + 4 S d L + 2 d K; train = 3 forward (docs/training.md)"}


def predicted_memory(config: RunConfig, model: Model, micro: int, height: int = 1) -> dict[str, Any]:
    """Bytes of a training step with `micro` sequences at once; linear in them, so two fake runs tell all."""
    total = count_parameters(model)["total"]
    one, two = (activation_bytes(config, model, sequences) for sequences in (1, 2))
    logits = config.data.length * classes(model) * levels_scored(config, height) * LOGIT_BYTES
    fixed = {"weights": 4 * total, "gradients": 4 * total, "optimizer": 8 * total,
             "average": 0 if config.train.ema is None else 4 * total, "weight_casts": max(0, 2 * one - two)}
    per_sequence = two - one + logits
    return {"micro_batch": micro, **fixed, "activations": micro * (two - one), "logits": micro * logits,
            "total": sum(fixed.values()) + micro * per_sequence, "fixed": sum(fixed.values()),
            "per_sequence": per_sequence}


def activation_bytes(config: RunConfig, model: Model, sequences: int) -> int:
    """What autograd keeps of the backbone's forward pass, each storage once, parameters left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # no public name yet; it is what torch.compile stands on

    kept: dict[int, Any] = {}
    cpu = torch.device("cpu")
    nodes = model.backbone.embedding.num_embeddings
    rows = getattr(getattr(model.backbone, "condition", None), "rows", None)
    levels = getattr(rows, "num_embeddings", 1)
    with FakeTensorMode():
        # the backbone again, with fake CPU parameters: meta tensors know no autocast
        backbone = config.backbone.build(nodes, levels)
        own = {parameter.untyped_storage()._cdata for parameter in backbone.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage  # holding it keeps its address from being used again
            return tensor

        ids = torch.zeros(sequences, config.data.length, dtype=torch.int64)
        level = torch.zeros(sequences, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(cpu, config.train.dtype):
            hidden = backbone(ids, torch.zeros(sequences), level)
        return sum(storage.nbytes() for storage in kept.values()) + hidden.untyped_storage().nbytes()
