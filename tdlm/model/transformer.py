"""The DiT backbone: a bidirectional transformer over node ids whose blocks are modulated by time or level (adaLN).

Pre-norm blocks with weight-only LayerNorm in float32, rotary attention over the full head width (base 10,000, halves
rotated), a 4x GELU(tanh) MLP, attention without biases; modulations start at zero, so a fresh block is the identity.
The condition is 256 sinusoids of the raw time t in [0, 1] through a small MLP (`time`), a row per level (`level`), or
nothing (`none`: the modulations keep their biases as learned constants). `forward` returns hidden states, never logits.
"""
from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import BackboneConfig
from .kernels.recording import Recording
from .kernels.rows import embed
from .kernels.stack import Kept, Weights, stack

SINUSOIDS = 256


def round_up(count: int, multiple: int = 128) -> int:
    """Rows of the embedding table: matrix kernels like round numbers."""
    return -(-count // multiple) * multiple


class Norm(nn.Module):
    """LayerNorm with a weight and no bias, computed in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], self.weight.float())


class TimeCondition(nn.Module):
    """Sinusoids of raw t, then two linear maps with SiLU."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(SINUSOIDS, width)
        self.outer = nn.Linear(width, width)

    def forward(self, time: Tensor, level: Tensor | None) -> Tensor:
        half = SINUSOIDS // 2
        frequency = torch.exp(torch.arange(half, device=time.device, dtype=torch.float32) * (-math.log(1e4) / half))
        angle = time.float()[:, None] * frequency
        features = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.inner.weight.dtype)
        return F.silu(self.outer(F.silu(self.inner(features))))


class LevelCondition(nn.Module):
    """One learned row per level; `none` is the same with a single row of zeros that is not learned."""

    def __init__(self, levels: int, width: int):
        super().__init__()
        self.rows = nn.Embedding(levels, width)
        nn.init.normal_(self.rows.weight, std=0.02)  # torch's N(0, 1) makes the modulations learn far too fast

    def forward(self, time: Tensor, level: Tensor | None) -> Tensor:
        assert level is not None, "a level-conditioned network needs a process that knows its level"
        return F.silu(self.rows(level))


class NoCondition(nn.Module):
    nothing: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1, width), persistent=False)

    def forward(self, time: Tensor, level: Tensor | None) -> Tensor:
        return self.nothing.expand(len(time), -1)


@torch.library.custom_op("tdlm::rotary", mutates_args=(), schema="(int length, int width, Device device) -> (Tensor, Tensor)")
def rotary(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (S, width / 2) of the rotary embedding, float32.

    An operator of its own, so that a compiler does not see through it: fused, every block would compute the powers, sines
    and cosines again for every head of every sequence (a sixth of a training step on an H200).
    """
    frequency = 1e4 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


@rotary.register_fake
def _(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (length, (width + 1) // 2)
    return torch.empty(shape, device=device), torch.empty(shape, device=device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + width/2}) by their angles, in the angles' float32 at least."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, condition_width: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = zeroed(nn.Linear(condition_width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)[:, None].chunk(6, dim=-1)
        B, S, d = x.shape
        h = modulate(self.attention_norm(x), shift_a, scale_a)
        q, k, v = self.qkv(h).view(B, S, 3, self.heads, d // self.heads).transpose(1, 3).unbind(2)  # (B, heads, S, width)
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + gate_a * self.attention_out(h.transpose(1, 2).reshape(B, S, d))
        h = modulate(self.mlp_norm(x), shift_m, scale_m)
        return x + gate_m * self.mlp_out(F.gelu(self.mlp_in(h), approximate="tanh"))

    def weights(self) -> Weights:
        """What `stack` computes the same with."""
        return Weights(self.attention_norm.weight, self.qkv.weight, self.attention_out.weight, self.mlp_norm.weight,
                       self.mlp_in.weight, self.mlp_in.bias, self.mlp_out.weight, self.mlp_out.bias)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def enter(x: Tensor, stream: torch.dtype) -> Tensor:
    """The start of the residual stream: in its own dtype where products are made in a narrow one."""
    return x.to(stream) if torch.is_autocast_enabled(x.device.type) else x


class Backbone(nn.Module):
    """Node ids (B, S) and a condition -> hidden states (B, S, d)."""

    stream = torch.float32
    fused: Literal["fast", "lean"] | None = None
    """All blocks as one function with its own backward pass (`kernels/stack.py`), and what that keeps; None: block by block."""
    float8 = False
    """With fused blocks: training's products in eight bits where they pay (`kernels/eight.py`)."""
    recording: Recording | None = None
    """With fused blocks: replays training's passes (`kernels/recording.py`)."""

    def __init__(self, config: BackboneConfig, nodes: int, levels: int):
        super().__init__()
        d, c = config.width, config.condition_width
        self.width, self.conditioning = d, config.conditioning
        self.embedding = nn.Embedding(round_up(nodes), d)
        nn.init.uniform_(self.embedding.weight, -1 / math.sqrt(d), 1 / math.sqrt(d))
        kinds = {"time": lambda: TimeCondition(c), "level": lambda: LevelCondition(levels, c), "none": lambda: NoCondition(c)}
        self.condition = kinds[config.conditioning]()
        self.blocks = nn.ModuleList(Block(d, config.heads, c) for _ in range(config.blocks))
        self.final_norm = Norm(d)
        self.final_modulation = zeroed(nn.Linear(c, 2 * d))
        self.head_width = d // config.heads
        self.kept = Kept()

    def forward(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"],
                level: Int[Tensor, "B"] | None, columns: Int[Tensor, "B n"] | None = None) -> Float[Tensor, "B out d"]:
        """Of all positions, or of some `columns` of each sequence (fused and without gradients)."""
        condition = self.condition(time, level)
        cos, sin = rotary(nodes.shape[1], self.head_width, nodes.device)
        if self.fused is not None:
            return self._stacked(nodes, condition, cos, sin, columns)
        assert columns is None, "block by block all positions are made"
        x = enter(self.embedding(nodes), self.stream)
        for block in self.blocks:
            x = block(x, condition, cos, sin)
        shift, scale = self.final_modulation(condition)[:, None].chunk(2, dim=-1)
        return modulate(self.final_norm(x), shift, scale)

    def _stacked(self, nodes: Tensor, condition: Tensor, cos: Tensor, sin: Tensor, columns: Tensor | None) -> Tensor:
        kind, exact = nodes.device.type, self.embedding.weight.dtype
        narrow = torch.is_autocast_enabled(kind)
        dtype, stream = (torch.get_autocast_dtype(kind), self.stream) if narrow else (exact, exact)
        with torch.autocast(kind, enabled=False):
            x = embed(self.embedding, nodes, stream)
            modulations = self._modulations(condition.to(torch.promote_types(condition.dtype, torch.float32)))
        blocks = [block.weights() for block in self.blocks]  # pyright: ignore[reportCallIssue]
        heads, float8 = self.width // self.head_width, self.float8 and narrow and torch.is_grad_enabled()
        return stack(x, modulations, cos, sin, blocks, self.final_norm.weight, heads, dtype, lean=self.fused == "lean",
                     float8=float8, recording=self.recording, kept=self.kept, columns=columns)

    def _modulations(self, condition: Float[Tensor, "B c"]) -> Float[Tensor, "#B sites3 d"]:
        """Shift, scale and gate of every norm, the last without a gate; of all sequences at once where nothing is told."""
        linears = [*(block.modulation for block in self.blocks), self.final_modulation]
        bias = torch.cat([linear.bias for linear in linears])[None]  # pyright: ignore[reportArgumentType]
        if self.conditioning != "none":
            bias = bias + condition @ torch.cat([linear.weight for linear in linears]).T  # pyright: ignore[reportArgumentType]
        return bias.view(len(bias), -1, self.width)
