"""Checkpoints of others in this package's names: the diffusion transformer of GIDD, and of MDLM, which is its ancestor.

Both store the network that `transformer.py` computes, under the same names (MDLM behind the prefix `backbone.`):

| theirs | ours |
|---|---|
| `vocab_embed.embedding` (tokens, then MASK) | `backbone.embedding.weight` (tokens, then the star tree's root, id V) |
| `sigma_map.mlp.0`, `.2` | `backbone.condition.inner`, `.outer` |
| `blocks.i.norm1`, `norm2`, `attn_qkv`, `attn_out` | `backbone.blocks.i.attention_norm`, `mlp_norm`, `qkv`, `attention_out` |
| `blocks.i.mlp.0`, `.2`, `adaLN_modulation` | `backbone.blocks.i.mlp_in`, `mlp_out`, `modulation` |
| `output_layer.norm_final`, `adaLN_modulation` | `backbone.final_norm`, `final_modulation` |
| `output_layer.linear` (a row a token; that of MASK is never a target) | `predictor.output` |

The orders inside agree: rows q|k|v, heads in sequence, modulations as shift, scale, gate of the attention, then of the
MLP; time features cos|sin of the raw time. Rotary tables are computed, not read. GIDD's training class has its rows
rounded up to a multiple of 128 and a `logit_bias`, which is zero; its published class has exactly V + 1 rows.

* GIDD: PAD is one of the V tokens (GPT-2: 50,257 ids and PAD, then MASK 50258: V = 50,258).
* MDLM: there is no row for PAD, MASK comes right behind the tokens. PAD gets a row of zeros and can never be predicted.
  Published MDLM is told no time: its time is always 0, so its condition c is a constant, and W c + b becomes the bias
  of every modulation, which is exact.

Only safetensors are read. A pickle can run code when it is opened, so pickled checkpoints are refused.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import BackboneConfig
from ..errors import RunError
from ..files import bytes_hash, file_hash
from ..hub import fetch_checkpoint
from .fold import fold_condition, time_condition
from .transformer import round_up

Family = Literal["gidd", "mdlm"]
FAMILIES: tuple[Family, ...] = ("gidd", "mdlm")
NEVER = -1e4
"""The logit of a token that the checkpoint does not know: its probability is exactly 0, its logarithm finite."""

_EMBEDDING = "vocab_embed.embedding"
_BLOCK = {"norm1": "attention_norm", "norm2": "mlp_norm", "attn_qkv": "qkv", "attn_out": "attention_out", "mlp.0": "mlp_in",
          "mlp.2": "mlp_out", "adaLN_modulation": "modulation"}
_ELSEWHERE = {"sigma_map.mlp.0": "condition.inner", "sigma_map.mlp.2": "condition.outer", "output_layer.norm_final": "final_norm",
              "output_layer.adaLN_modulation": "final_modulation"}
_OUTPUT = ("output_layer.linear.weight", "output_layer.linear.bias")
_COMPUTED = re.compile(r"rotary_emb\.(cos_cached|sin_cached|inv_freq)")
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Imported:
    """A network of others: which backbone it is, its weights for the star tree of `tokens` and a shared head."""

    family: Family
    backbone: BackboneConfig
    tensors: dict[str, Tensor]
    tokens: int
    """V, PAD included; the root of the star tree (MASK) is V."""
    missing: tuple[int, ...]
    """Tokens that the checkpoint does not know."""
    length: int
    """Positions it was trained with."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its own config.json, where there is one."""
    name: str = ""
    """Where it came from, without folders."""
    hash: str = ""


def parse(spec: str | Path) -> tuple[Family | None, str]:
    """`gidd:PATH` and `mdlm:PATH` name a family; without one it is told from the tensors. `hf:` may stand before a hub's id."""
    head, colon, rest = str(spec).partition(":")
    for family in FAMILIES:
        if colon and head == family:
            return family, rest.removeprefix("hf:")
    return None, str(spec).removeprefix("hf:")


def read_checkpoint(spec: str | Path, *, tokens: int | None = None, heads: int | None = None) -> Imported:
    """A GIDD or MDLM checkpoint: a .safetensors file, a Hugging Face folder, or the id of a model on the hub.

    `tokens` is V of the tokenizer it will be used with. `heads` is needed only where neither a rotary table nor a
    config.json tells them.
    """
    family, place = parse(spec)
    files, settings = checkpoint_files(place)
    tensors = _tensors(files)
    family = family or _family(tensors, settings)
    rows, d = tensors[_EMBEDDING].shape
    heads = heads or _heads(tensors, settings, d)
    tokens, known = _token_count(family, rows, tokens, settings)
    if family == "mdlm" and settings.get("time_conditioning"):
        raise RunError(f"{place} is an MDLM that is told its noise level sigma; only the published kind, which is told nothing, "
                       "can be read")
    blocks = 1 + max((int(match[1]) for name in tensors if (match := _BLOCK_NAME.fullmatch(name))), default=-1)
    backbone = BackboneConfig(blocks=blocks, width=d, heads=heads, conditioning="time" if family == "gidd" else "none",
                              condition_width=_size(tensors, "sigma_map.mlp.0.weight"))
    renamed = {_rename(name): value for name, value in tensors.items() if _is_taken(name, value)}
    renamed |= _vocabulary(tensors, tokens, known)
    if family == "mdlm":
        renamed = fold_condition(renamed, time_condition(renamed, torch.zeros(1))[0])
    digest = bytes_hash("".join(file_hash(path) for path in files).encode())
    return Imported(family, backbone, renamed, tokens, tuple(range(known, tokens)), _length(tensors, settings), settings,
                    Path(place).name if Path(place).exists() else place, digest)


def checkpoint_files(place: str) -> tuple[list[Path], dict[str, Any]]:
    """The safetensors files of a checkpoint, and the config.json beside them ({} where there is none)."""
    path = Path(place)
    if not place or all((path / name).is_file() for name in ("config.json", "tree.safetensors")):
        raise RunError(f"{place} is a run of this package already: use it as it is" if place else "no checkpoint is named; give "
                       "a .safetensors file, a folder, or an owner/model of the Hugging Face hub")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise RunError(f"{path.name} is no safetensors file; pickled checkpoints can run code and are not opened. Load it "
                           "where you trust it and save its weights with safetensors.torch.save_file")
        return [path], {}
    folder = path if path.is_dir() else fetch_checkpoint(place, RunError)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RunError(f"{place} holds no .safetensors file; pickled checkpoints can run code and are not opened, convert "
                       "them with safetensors.torch.save_file")
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / 'config.json'} cannot be read ({error}); fetch the checkpoint again") from None
    return files, settings if isinstance(settings, dict) else {}


def _tensors(files: list[Path]) -> dict[str, Tensor]:
    """Every tensor in float32, without the prefix that a wrapping module put in front of all names."""
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path.name} cannot be read as safetensors ({error}); fetch it again") from None
    anchor = next((name for name in found if name == _EMBEDDING or name.endswith("." + _EMBEDDING)), None)
    if anchor is None:
        raise RunError(f"{files[0].name} holds no {_EMBEDDING!r}, so it is no checkpoint of GIDD or MDLM; its tensors are "
                       f"{', '.join(sorted(found)[:4])}, ...")
    prefix = anchor.removesuffix(_EMBEDDING)
    return {name.removeprefix(prefix): value for name, value in found.items()}


def _size(tensors: dict[str, Tensor], name: str) -> int:
    if name not in tensors:
        raise RunError(f"the checkpoint lacks {name!r}; it is no whole checkpoint of GIDD or MDLM")
    return len(tensors[name])


def _family(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Family:
    """MDLM keeps the frequencies of its rotary embedding, GIDD the tables themselves."""
    return "mdlm" if settings.get("model_type") == "mdlm" or "rotary_emb.inv_freq" in tensors else "gidd"


def _heads(tensors: dict[str, Tensor], settings: dict[str, Any], width: int) -> int:
    """From the width of a head, which the rotary tables have; else from the configuration."""
    if "rotary_emb.cos_cached" in tensors:
        return width // tensors["rotary_emb.cos_cached"].shape[-1]
    if "rotary_emb.inv_freq" in tensors:
        return width // (2 * len(tensors["rotary_emb.inv_freq"]))
    for name in ("num_attention_heads", "n_heads"):
        if isinstance(settings.get(name), int):
            return settings[name]
    raise RunError("the checkpoint does not say how many attention heads it has; give them: --heads N")


def _length(tensors: dict[str, Tensor], settings: dict[str, Any]) -> int:
    for name in ("max_seq_len", "model_length"):
        if isinstance(settings.get(name), int):
            return settings[name]
    return tensors["rotary_emb.cos_cached"].shape[1] if "rotary_emb.cos_cached" in tensors else 512


def _token_count(family: Family, rows: int, tokens: int | None, settings: dict[str, Any]) -> tuple[int, int]:
    """V, and how many of the V tokens have a row. `rows` are those of the embedding, MASK and rounding included."""
    if family == "mdlm":
        known = rows - 1
        tokens = known + 1 if tokens is None else tokens
        fits = tokens in (known, known + 1)
    else:
        stated = settings.get("vocab_size")
        if tokens is None and isinstance(stated, int):
            tokens = stated - 1
        if tokens is None and rows % 128 == 0:
            raise RunError(f"the checkpoint has {rows} rows, rounded up: how many of them are tokens? Give the tokenizer")
        known = tokens = rows - 1 if tokens is None else tokens
        fits = rows in (tokens + 1, round_up(tokens + 1))
    if not fits:
        raise RunError(f"the checkpoint has {rows} rows, which does not fit {tokens} tokens and MASK; it was trained with "
                       "another tokenizer: give that one")
    return tokens, min(known, tokens)


def _is_taken(name: str, value: Tensor) -> bool:
    """Whether a tensor is renamed as it is; what is neither taken nor known is an error."""
    block = _BLOCK_NAME.fullmatch(name)
    if (block and block[2] in _BLOCK) or name.rpartition(".")[0] in _ELSEWHERE:
        return True
    if name == "logit_bias" and bool((value != 0).any()):
        raise RunError("the checkpoint's logit_bias is not zero; a network that adds to the logit of its input id is not "
                       "supported")
    if name in (_EMBEDDING, *_OUTPUT, "logit_bias") or _COMPUTED.fullmatch(name):
        return False
    raise RunError(f"the checkpoint holds {name!r}, which GIDD and MDLM do not have; it is a network of another kind")


def _rename(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if block := _BLOCK_NAME.fullmatch(name):
        return f"backbone.blocks.{block[1]}.{_BLOCK[block[2]]}.{kind}"
    return f"backbone.{_ELSEWHERE[stem]}.{kind}"


def _vocabulary(tensors: dict[str, Tensor], tokens: int, known: int) -> dict[str, Tensor]:
    """Embedding and output of our ids: tokens 0..V-1, then MASK as the root. Their MASK follows the known tokens."""
    theirs, d = tensors[_EMBEDDING], tensors[_EMBEDDING].shape[1]
    embedding = torch.zeros(round_up(tokens + 1), d)
    embedding[:known], embedding[tokens] = theirs[:known], theirs[known]
    weight, bias = torch.zeros(tokens, d), torch.full((tokens,), NEVER)
    for name in _OUTPUT:
        _size(tensors, name)
    weight[:known], bias[:known] = (tensors[name][:known] for name in _OUTPUT)
    return {"backbone.embedding.weight": embedding, "predictor.output.weight": weight, "predictor.output.bias": bias}

