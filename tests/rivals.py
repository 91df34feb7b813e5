"""Small checkpoints as others write them: random weights under the names of GIDD and MDLM."""
from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tdlm.config import BackboneConfig


def dit_tensors(backbone: BackboneConfig, rows: int, seed: int = 1) -> dict[str, Tensor]:
    """Every weight of their transformer with `rows` ids, none at its start."""
    d, c, generator = backbone.width, backbone.condition_width, torch.Generator().manual_seed(seed)
    shapes = {"vocab_embed.embedding": (rows, d), "output_layer.linear.weight": (rows, d), "output_layer.linear.bias": (rows,),
              "sigma_map.mlp.0.weight": (c, 256), "sigma_map.mlp.0.bias": (c,), "sigma_map.mlp.2.weight": (c, c),
              "sigma_map.mlp.2.bias": (c,), "output_layer.norm_final.weight": (d,),
              "output_layer.adaLN_modulation.weight": (2 * d, c), "output_layer.adaLN_modulation.bias": (2 * d,)}
    for i in range(backbone.blocks):
        block = {"norm1.weight": (d,), "norm2.weight": (d,), "attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d),
                 "mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,),
                 "adaLN_modulation.weight": (6 * d, c), "adaLN_modulation.bias": (6 * d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def write_gidd(path: Path, backbone: BackboneConfig, tokens: int, seed: int = 1, length: int = 16) -> Path:
    """The published class: a row for each of the V tokens (PAD among them) and MASK."""
    tables = torch.ones(1, length, 3, 1, backbone.width // backbone.heads)
    weights = dit_tensors(backbone, tokens + 1, seed)
    save_file({**weights, "rotary_emb.cos_cached": tables, "rotary_emb.sin_cached": tables * 0}, path)
    return path


def write_mdlm(path: Path, backbone: BackboneConfig, known: int, seed: int = 1) -> Path:
    """MDLM: a row for each token of the text, then MASK; none for PAD. A wrapping module has its name in front."""
    tensors = dit_tensors(backbone, known + 1, seed)
    tensors["rotary_emb.inv_freq"] = torch.ones(backbone.width // backbone.heads // 2)
    save_file({f"backbone.{name}": value for name, value in tensors.items()}, path)
    return path
