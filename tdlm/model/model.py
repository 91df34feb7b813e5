"""Backbone and head as one module, and the parameters counted by part."""
from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .head import Head


@runtime_checkable
class Network(Protocol):
    """What objectives and samplers ask of a network (the proofs put tables in its place)."""

    told_time: bool
    """Whether the answer depends on t besides the noisy sequence."""

    @property
    def head(self) -> Head:
        ...

    def hidden(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"],
               level: Int[Tensor, "B"] | None) -> Float[Tensor, "B S d"]:
        ...


class Model(nn.Module):
    """`backbone` is a transformer of this folder or a plug-in's: it has `embedding`, `blocks`, `width` and `conditioning`,
    and turns node ids, a time and a level into hidden states."""

    def __init__(self, backbone: Any, head: nn.Module):
        super().__init__()
        self.backbone, self.predictor = backbone, head
        self.told_time = backbone.conditioning == "time"

    @property
    def head(self) -> Head:
        return self.predictor  # pyright: ignore[reportReturnType]

    def hidden(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"],
               level: Int[Tensor, "B"] | None) -> Float[Tensor, "B S d"]:
        return self.backbone(nodes, time, level)

    def hidden_at(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"], level: Int[Tensor, "B"] | None,
                  columns: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
        """Of some columns of each sequence: in its last block a backbone that can makes nothing else."""
        if getattr(self.backbone, "fused", None) is not None and not torch.is_grad_enabled():
            return self.backbone(nodes, time, level, columns)
        return self.hidden(nodes, time, level).take_along_dim(columns[..., None], 1)


def count_parameters(model: Model) -> dict[str, int]:
    """Raw counts by part; `elsewhere` is everything outside the blocks, `total` is all."""
    def count(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    backbone, total = model.backbone, count(model)
    blocks, embedding, head = count(backbone.blocks), count(backbone.embedding), count(model.predictor)
    condition = count(backbone.condition) if hasattr(backbone, "condition") else 0
    return {"blocks": blocks, "embedding": embedding, "conditioning": condition,
            "final": total - blocks - embedding - condition - head, "head": head, "elsewhere": total - blocks, "total": total}


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """bfloat16 matrix products over float32 weights, or plain float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
