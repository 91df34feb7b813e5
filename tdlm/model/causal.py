"""Left-to-right transformers, the autoregressive yardstick: two well-known styles with the same interface as the DiT.

| style | norm | positions | MLP | biases |
|---|---|---|---|---|
| `llama` | RMSNorm | rotary, base 10,000 | SwiGLU, three matrices of width x 4 width | none |
| `gpt2` | LayerNorm | learned | GELU(tanh), two matrices of width x 4 width | everywhere |

Both are pre-norm: x += attention(norm(x)), x += mlp(norm(x)), one more norm at the end, all with eps 1e-5. (The baselines'
autoregressive model is the first: intermediate size 4 x width.) Initial weights are normal with standard deviation 0.02,
those that write into the residual stream divided by sqrt(2 blocks) in the `gpt2` style, as in the originals. `forward`
returns hidden states; with a `Cache` it takes only the new positions, so that sampling S tokens costs S positions instead
of S^2 / 2.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..registry import register
from .transformer import enter, rotary, rotate, round_up

Style = Literal["llama", "gpt2"]


class Cache:
    """Keys and values of the positions that were seen, in room that is made once for `length` of them."""

    def __init__(self, length: int):
        self.length, self.seen = length, 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new positions (B, heads, new, width) of a block behind those seen; returns all of them so far."""
        B, heads, new, width = key.shape
        if block not in self.kept:
            self.kept[block] = (key.new_empty(B, heads, self.length, width), value.new_empty(B, heads, self.length, width))
        end = self.seen + new
        for room, states in zip(self.kept[block], (key, value)):
            room[:, :, self.seen:end] = states
        keys, values = self.kept[block]
        return keys[:, :, :end], values[:, :, :end]


class RootNorm(nn.RMSNorm):
    """RMSNorm in the weights' precision, whatever the stream's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.heads, self.style = heads, style
        bias = style == "gpt2"
        self.attention_norm, self.mlp_norm = norm(width, style), norm(width, style)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width * (1 if bias else 2), bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, cache: Cache | None, number: int) -> Tensor:
        B, S, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, S, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            k, v = cache.extend(number, k, v)
        seen = k.shape[2] - S
        # a single new position sees everything; several behind seen ones need the triangle that starts at their first
        mask = torch.ones(S, seen + S, dtype=torch.bool, device=x.device).tril(seen) if seen and S > 1 else None
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not seen)
        x = x + self.attention_out(h.transpose(1, 2).reshape(B, S, d))
        h = self.mlp_in(self.mlp_norm(x))
        if self.style == "llama":
            gate, up = h.chunk(2, dim=-1)
            return x + self.mlp_out(F.silu(gate) * up)
        return x + self.mlp_out(F.gelu(h, approximate="tanh"))


def norm(width: int, style: Style) -> nn.Module:
    return nn.LayerNorm(width, eps=1e-5) if style == "gpt2" else RootNorm(width, eps=1e-5)


class CausalBackbone(nn.Module):
    """Ids (B, S) -> hidden states (B, S, d); position i sees positions up to i. Time and level say nothing here."""

    conditioning = "none"
    stream = torch.float32
    caches = True
    """It can go on from a `Cache`."""

    def __init__(self, config: Causal, nodes: int):
        super().__init__()
        d = config.width
        self.width, self.style, self.head_width = d, config.style, d // config.heads
        self.embedding = nn.Embedding(round_up(nodes), d)
        self.longest = config.longest if config.style == "gpt2" else None
        self.positions = None if self.longest is None else nn.Embedding(self.longest, d)
        self.blocks = nn.ModuleList(CausalBlock(d, config.heads, config.style) for _ in range(config.blocks))
        self.final_norm = norm(d, config.style)
        self._initialise()

    def _initialise(self) -> None:
        """Norms keep torch's ones and zeros."""
        into_residual = 1 / math.sqrt(2 * len(self.blocks)) if self.style == "gpt2" else 1.0
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 * (into_residual if name.endswith("_out.weight") else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"] | None = None, level: Int[Tensor, "B"] | None = None,
                cache: Cache | None = None) -> Float[Tensor, "B S d"]:
        first = cache.seen if cache is not None else 0
        end = first + nodes.shape[1]
        x, angles = self.embedding(nodes), None
        if self.positions is None:
            cos, sin = rotary(end, self.head_width, nodes.device)
            angles = cos[first:], sin[first:]
        else:
            if end > self.positions.num_embeddings:
                raise ConfigError(f"this network has {self.positions.num_embeddings} positions, {end} were asked for; "
                                  "use a longer backbone.longest when training, or the llama style")
            x = x + self.positions.weight[first:end]
        x = enter(x, self.stream)
        for number, block in enumerate(self.blocks):
            x = block(x, angles, cache, number)
        if cache is not None:
            cache.seen = end
        return self.final_norm(x)


@register("causal")
@dataclass(frozen=True)
class Causal:
    """How deep, how wide, in which style."""

    style: Style = "llama"
    blocks: int = 12
    width: int = 768
    heads: int = 12
    longest: int = 1024
    """Rows of the position table (`gpt2` style)."""
    role = "backbone"
    causal = True

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.longest < 1:
            raise ConfigError(f"backbone.blocks and backbone.longest must be at least 1, got {self.blocks} and {self.longest}")
        if self.heads < 1 or self.width % (2 * self.heads):
            raise ConfigError(f"backbone.width must be a multiple of 2 x heads (rotary pairs), got {self.width} and "
                              f"{self.heads} heads")

    def build(self, nodes: int, levels: int) -> CausalBackbone:
        return CausalBackbone(self, nodes)
