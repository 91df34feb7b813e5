"""Backbone and head as one module, and the parameters counted by part."""
from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .head import Head
from .transformer import Backbone


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
    def __init__(self, backbone: Backbone, head: nn.Module):
        super().__init__()
        self.backbone, self.predictor = backbone, head
        self.told_time = backbone.conditioning == "time"

    @property
    def head(self) -> Head:
        return self.predictor  # pyright: ignore[reportReturnType]

    def hidden(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"],
               level: Int[Tensor, "B"] | None) -> Float[Tensor, "B S d"]:
        return self.backbone(nodes, time, level)


def count_parameters(model: Model) -> dict[str, int]:
    """Raw counts by part; `elsewhere` is everything outside the blocks, `total` is all."""
    def count(*parts: nn.Module) -> int:
        return sum(p.numel() for part in parts for p in part.parameters())

    backbone = model.backbone
    parts = {"blocks": count(backbone.blocks), "embedding": count(backbone.embedding),
             "conditioning": count(backbone.condition), "final": count(backbone.final_norm, backbone.final_modulation),
             "head": count(model.predictor)}
    total = sum(parts.values())
    return {**parts, "elsewhere": total - parts["blocks"], "total": total}


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """bfloat16 matrix products over float32 weights, or plain float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
