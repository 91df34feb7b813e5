"""Left-to-right transformers, the autoregressive yardstick: two well-known styles with the same interface as the DiT.

| style | norm | positions | MLP | biases |
|---|---|---|---|---|
| `llama` | RMSNorm | rotary | SwiGLU, three matrices of width x 4 width | none |
| `gpt2` | LayerNorm | learned | GELU(tanh), two matrices of width x 4 width | everywhere |

(The baselines' autoregressive model is the first: intermediate size 4 x width.) Initial weights are normal with standard
deviation 0.02, those that write into the residual stream divided by sqrt(2 blocks) in the `gpt2` style, as in the
originals. `forward` returns hidden states; with a `Cache` it takes only the new positions, so that sampling S tokens costs
S positions instead of S^2 / 2.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..registry import register
from .transformer import rotary, rotate, round_up

Style = Literal["llama", "gpt2"]


@dataclass
class Cache:
    """Keys and values of the positions that were seen: one pair of tensors (B, heads, seen, width) a block."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if block == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[block] = torch.cat([self.keys[block], key], 2)
            self.values[block] = torch.cat([self.values[block], value], 2)
        return self.keys[block], self.values[block]


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.heads, self.style = heads, style
        bias = style == "gpt2"
        norm = nn.LayerNorm if bias else nn.RMSNorm
        self.attention_norm, self.mlp_norm = norm(width, eps=1e-5), norm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width * (1 if bias else 2), bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, number: int) -> Tensor:
        B, S, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, S, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.style == "llama":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(number, k, v)
        seen = k.shape[2] - S
        mask = None if not seen else torch.ones(S, seen + S, dtype=torch.bool, device=x.device).tril(seen)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not seen)
        x = x + self.attention_out(h.transpose(1, 2).reshape(B, S, d))
        h = self.mlp_in(self.mlp_norm(x))
        if self.style == "llama":
            gate, up = h.chunk(2, dim=-1)
            return x + self.mlp_out(F.silu(gate) * up)
        return x + self.mlp_out(F.gelu(h, approximate="tanh"))


class CausalBackbone(nn.Module):
    """Ids (B, S) -> hidden states (B, S, d); position i sees positions up to i. Time and level say nothing here."""

    conditioning = "none"

    def __init__(self, config: Causal, nodes: int):
        super().__init__()
        d = config.width
        self.width, self.style, self.head_width = d, config.style, d // config.heads
        self.embedding = nn.Embedding(round_up(nodes), d)
        self.positions = nn.Embedding(config.longest, d) if config.style == "gpt2" else None
        self.blocks = nn.ModuleList(CausalBlock(d, config.heads, config.style) for _ in range(config.blocks))
        self.final_norm = (nn.LayerNorm if config.style == "gpt2" else nn.RMSNorm)(d, eps=1e-5)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.style == "gpt2":
            for block in self.blocks:
                for out in (block.attention_out, block.mlp_out):
                    nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def forward(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"] | None = None, level: Int[Tensor, "B"] | None = None,
                cache: Cache | None = None) -> Float[Tensor, "B S d"]:
        first, length = cache.seen if cache is not None else 0, nodes.shape[1]
        x = self.embedding(nodes)
        cos, sin = rotary(first + length, self.head_width, nodes.device)
        if self.positions is not None:
            if first + length > self.positions.num_embeddings:
                raise ConfigError(f"this network has {self.positions.num_embeddings} positions, {first + length} were asked "
                                  "for; train with a longer backbone.longest, or use the llama style")
            x = x + self.positions(torch.arange(first, first + length, device=nodes.device))
        for number, block in enumerate(self.blocks):
            x = block(x, cos[first:], sin[first:], cache, number)
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
