"""How much memory a training step takes, part by part.

On a GPU the DiT backbone trains with blocks that are fused by hand and replayed (`kernels/stack.py`, `kernels/recording.py`).
What they hold can be counted. With N = B S positions of a micro-batch, d the width, L blocks, e bytes of a number in the
products' dtype and s of one in the stream's,

    weights, optimizer, average    4, 8 and 4 bytes a parameter that learns
    matrices     the blocks' matrices in the products' dtype: 12 d^2 e L (float8: d^2 e L, and 22 d^2 L in eight bits)
    kept         L N d (s + 6 e + inside) for the backward pass, with 4 e inside the MLP, 4 (float8) or 0 (lean); the last
                 stream and the hidden states N d (s + e); statistics of norms and attention
    backward     10 e N d, with float8 5 N d more: what the way back needs at the last block, when all the rest is still kept;
                 and the gradient of a block's matrices. All others lie where blocks have given back what they kept (where
                 that is not enough for all gradients, the difference counts instead)
    buffers      N d (s + e), modulations: a replayed pass finds its input and its output's gradient in their own places
    gradients    4 bytes for each parameter outside of the fused blocks, and once more for a table that embedding and head
                 share: both make a gradient of it. With several micro-batches, too: 4 for each parameter, in which they add
                 up, and for the blocks' as handed out
    head         what it holds besides: states, logits, its matrices in the products' dtype
    allocator    ALLOCATOR of all that: sizes are rounded up, and gaps cannot always be filled

The total is what torch *reserves* on the device (`torch.cuda.max_memory_reserved`); the driver's own context comes on top. It
is an upper bound in one thing: every position may ask the head (in a cascade half of them do).

Everywhere else (a CPU, `--compile False`, other backbones) it is what torch *allocates* without a compiler: float32 weights,
gradients and two moments, what autograd keeps for the backward pass (found by running the real backbone on fake tensors),
copies of weights, and the head.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..model.head import FEW, WIDE
from ..model.kernels import linear_ce
from ..model.model import Model, autocast, count_parameters

LOGIT_BYTES = 12
"""Kept per logit of a head that keeps them: float32 masked logits and their softmax, and the gradient while it is formed."""
ALLOCATOR = 0.05
"""Share that torch's allocator takes besides: with it eight measured runs lie within 3 percent (tests/train/test_memory.py)."""
MEANS = {True: "reserved by torch on a GPU, with fused and replayed blocks",
         False: "allocated by torch, without fused blocks and without a compiler"}
Predictor = Callable[[int], dict[str, Any]]


def predicted_memory(config: RunConfig, model: Model, micro: int, height: int = 1, fused: bool | None = None) -> dict[str, Any]:
    """Bytes of a training step with `micro` sequences at once, by part; `model` may lie on the meta device."""
    return predictor(config, model, height, fused)(micro)


def predictor(config: RunConfig, model: Model, height: int = 1, fused: bool | None = None) -> Predictor:
    """`predicted_memory` of any number of sequences. `fused` None: where the backbone has fused blocks."""
    many = has_fused(model) and fused is not False
    parts = _fused(config, model, height) if many else _plain(config, model, height)

    def predict(micro: int) -> dict[str, Any]:
        several = micro < config.train.batch
        found, one_more = parts(micro, several), parts(micro + 1, several)
        counted = sum(found.values())
        share = ALLOCATOR if many else 0
        total, per_sequence = counted * (1 + share), (sum(one_more.values()) - counted) * (1 + share)
        extra = {"allocator": round(share * counted)} if many else {}
        return {"means": MEANS[many], "micro_batch": micro, **found, **extra, "total": round(total),
                "fixed": round(total - micro * per_sequence), "per_sequence": round(per_sequence)}

    return predict


def has_fused(model: Model) -> bool:
    return hasattr(model.backbone, "fused")


def _fused(config: RunConfig, model: Model, height: int) -> Callable[[int, bool], dict[str, int]]:
    train, backbone = config.train, model.backbone
    d, L, heads = backbone.width, len(backbone.blocks), config.backbone.heads
    e, s = (2, 2 if train.stream == "bfloat16" else 4) if train.dtype == "bfloat16" else (4, 4)
    inside = 0 if train.memory == "lean" else 4 if train.float8 else 4 * e
    told = backbone.conditioning != "none"  # else the modulations' matrices learn nothing
    everything = sum(p.numel() for p in model.parameters())
    modulation = sum(p.numel() for name, p in backbone.named_parameters() if "modulation.weight" in name)
    learns = everything if told else everything - modulation
    blocks = sum(weight.numel() for block in backbone.blocks for weight in block.weights())
    table = backbone.embedding.weight.numel() if reads_embedding(model) else 0
    narrow = (d * d + 5 * d) * e + 22 * d * d if train.float8 else (12 * d * d + 5 * d) * e if e < 4 else 0

    def parts(micro: int, several: bool) -> dict[str, int]:
        N = micro * config.data.length
        kept = L * N * (d * (s + 6 * e + inside) + 4 * (4 + heads))  # statistics of two norms, and a sum for each head
        modulations = 4 * (6 * L + 2) * d * (micro if told else 1)
        return {
            "weights": 4 * everything, "optimizer": 8 * learns, "average": 0 if train.ema is None else 4 * everything,
            "matrices": L * narrow,
            "kept": kept + N * (d * (s + e) + 8),
            "backward": N * d * (10 * e + 5 * train.float8) + max(4 * blocks // L, 4 * blocks - kept),
            "buffers": N * d * (s + e) + 2 * modulations,
            "gradients": 4 * (learns - blocks + table + modulation * told) + several * 4 * (learns + blocks),
            "head": head_bytes(config, model, N, height, e, fused=True),
        }

    return parts


def reads_embedding(model: Model) -> bool:
    """Whether the head makes a gradient of the embedding, too."""
    return any(getattr(part, name, None) for part in model.head.modules()  # type: ignore[attr-defined]
               for name in ("_embedding", "_tied", "_rows"))


def classes(model: Model) -> int:
    """Logits of a scored position (K)."""
    return getattr(model.head, "classes", model.head.branching)  # type: ignore[attr-defined]


def head_bytes(config: RunConfig, model: Model, positions: int, height: int, e: int, *, fused: bool) -> int:
    """What the head holds of `positions`, the gradients of its parameters left out; `e` bytes a number of its products."""
    head, d, K = model.head, model.backbone.width, classes(model)
    states = 2 * positions * d * e  # with their gradient
    if getattr(head, "flat", False) and K >= WIDE:
        return states + _wide_bytes(K, d, e, positions)
    if K >= WIDE and getattr(head, "clusters", None) is not None:  # wide at the root alone; a copy of the rows in its order
        clusters = positions * head.branching * LOGIT_BYTES  # type: ignore[attr-defined]
        return states + _wide_bytes(K, d, e, positions, 1 if fused else 3) + 8 * K * d + clusters
    groups = getattr(head, "groups", None)
    if fused and groups is not None:
        rows = sum(bundle.table.numel() for bundle in groups.bundles)  # matrices, and gradients of their blocks
        return states + 2 * positions * K * e + 2 * rows * d * e
    if fused and getattr(head, "cheap", False) and not hasattr(head, "groups"):
        return states + 2 * positions * K * e + 2 * K * d * e
    logits = positions * (height if config.method.causal else 1) * K
    if hasattr(head, "groups") and K <= FEW:  # every position gathers the rows of its children
        return logits * (LOGIT_BYTES + d * (e + 4))
    return logits * LOGIT_BYTES


def _wide_bytes(K: int, d: int, e: int, positions: int, blocks: int = 1) -> int:
    """Logits of a block (several times, where nothing is done in place); the matrix, its gradient in float32, and a block's
    part of that."""
    wide = math.ceil(K / linear_ce.ALIGNED) * linear_ce.ALIGNED
    return blocks * min(linear_ce.BLOCK_BYTES, positions * wide * e) + wide * d * (2 * e + 4)


def _plain(config: RunConfig, model: Model, height: int) -> Callable[[int, bool], dict[str, int]]:
    """Linear in the sequences as far as the backbone goes, so two fake runs tell all."""
    total = count_parameters(model)["total"]
    one, two = (activation_bytes(config, model, sequences) for sequences in (1, 2))
    e = 2 if config.train.dtype == "bfloat16" else 4

    def parts(micro: int, several: bool) -> dict[str, int]:
        return {"weights": 4 * total, "gradients": 4 * total, "optimizer": 8 * total,
                "average": 0 if config.train.ema is None else 4 * total, "weight_casts": max(0, 2 * one - two),
                "activations": micro * (two - one),
                "logits": head_bytes(config, model, micro * config.data.length, height, e, fused=False)}

    return parts


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
