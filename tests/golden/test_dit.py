"""GIDD's own network, to the last activation: the numbers of its code against ours with the imported weights."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tdlm.model.head import Shared
from tdlm.model.imports import Imported, read_checkpoint
from tdlm.model.model import Model
from tdlm.train.checkpoint import fill
from tdlm.tree.tree import Tree

from .fixture import Golden

GOLD = Golden("dit")
TOKENS = int(GOLD["vocab_size"]) - 1
LOGITS, ACTIVATIONS = 5e-5, 5e-4


def training_tensors() -> dict[str, Tensor]:
    return {name.removeprefix("w/"): GOLD[name].contiguous() for name in GOLD.matching("w/*")}


def published_tensors() -> dict[str, Tensor]:
    """The published class: V + 1 rows, no `logit_bias`."""
    rows = TOKENS + 1
    held = {name: value for name, value in training_tensors().items() if name != "logit_bias"}
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        held[name] = held[name][:rows].contiguous()
    return held


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Imported]:
    folder, found = tmp_path_factory.mktemp("gidd"), {}
    for name, tensors in (("training", training_tensors()), ("published", published_tensors())):
        save_file(tensors, folder / f"{name}.safetensors")
        found[name] = read_checkpoint(folder / f"{name}.safetensors", tokens=TOKENS)
    return found


def network(source: Imported) -> Model:
    """Our network, filled through the same door as a checkpoint of our own: every name and shape must fit."""
    tree = Tree.star(source.tokens)
    backbone = source.backbone.build(tree.nodes, tree.height)
    model = Model(backbone, Shared().build(tree, backbone.embedding, None))
    fill(model, source.tensors, Path("gidd"))
    return model.eval()


@torch.no_grad()
def hidden(model: Model, positions: int | None = None) -> Tensor:
    ids = GOLD["input_ids"].long()[:, :positions]
    return model.hidden(ids, GOLD["t"], None)


@torch.no_grad()
def logits(model: Model, positions: int | None = None) -> Tensor:
    """All 128 columns: those of MASK and of the rounding are not among ours, so they are taken from the source."""
    return F.linear(hidden(model, positions), GOLD["w/output_layer.linear.weight"], GOLD["w/output_layer.linear.bias"])


def near(got: Tensor, name: str, tolerance: float) -> None:
    torch.testing.assert_close(got, GOLD[name], atol=tolerance, rtol=0)


def test_sizes_are_read_from_the_tensors(imported: dict[str, Imported]) -> None:
    for source in imported.values():
        assert (source.family, source.tokens, source.missing) == ("gidd", 16, ())
        assert source.length == int(GOLD["max_seq_len"])
        assert (source.backbone.blocks, source.backbone.width, source.backbone.heads) == (2, 64, int(GOLD["n_heads"]))
        assert source.backbone.condition_width == 16 and source.backbone.conditioning == "time"


def test_rounded_and_published_rows_give_the_same_weights(imported: dict[str, Imported]) -> None:
    first, second = imported["training"].tensors, imported["published"].tensors
    assert set(first) == set(second) and len(first["backbone.embedding.weight"]) == int(GOLD["rounded_vocab_size"])
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert imported["training"].hash != imported["published"].hash


@pytest.mark.parametrize("kind", ["training", "published"])
def test_logits(imported: dict[str, Imported], kind: str) -> None:
    model = network(imported[kind])
    near(logits(model), "logits", LOGITS)
    near(logits(model, 5), "logits_seq5", LOGITS)
    near(logits(model)[..., :TOKENS + 1], "hf/logits", LOGITS)


def test_our_head_is_their_softmax_without_mask(imported: dict[str, Imported]) -> None:
    model = network(imported["published"])
    states = hidden(model).flatten(0, 1)
    root = torch.full((len(states),), TOKENS)
    with torch.no_grad():
        ours = model.head.log_probs(states, root)
    wanted = GOLD["hf/logits"].flatten(0, 1)[:, :TOKENS].log_softmax(-1)
    assert ours.shape == (96, TOKENS)
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_activations(imported: dict[str, Imported]) -> None:
    model, seen = network(imported["published"]), {}
    watched = {"embed": model.backbone.embedding, "block0": model.backbone.blocks[0], "block1": model.backbone.blocks[1],
               "time_mlp": model.backbone.condition.outer}
    for name, module in watched.items():
        module.register_forward_hook(lambda module, given, answer, name=name: seen.update({name: answer}))
    hidden(model)
    assert torch.equal(seen["embed"], GOLD["act/embed"])
    near(seen["time_mlp"], "act/time_mlp", 1e-5)
    near(seen["block0"], "act/block0", ACTIVATIONS)
    near(seen["block1"], "act/block1", ACTIVATIONS)


def test_the_rotary_tables_are_the_ones_we_compute() -> None:
    from tdlm.model.transformer import rotary

    cos, sin = rotary(int(GOLD["max_seq_len"]), 64 // int(GOLD["n_heads"]), torch.device("cpu"))
    for got, name in ((cos, "w/rotary_emb.cos_cached"), (sin, "w/rotary_emb.sin_cached")):
        queries = GOLD[name][0, :, 0, 0]
        torch.testing.assert_close(torch.cat([got, got], 1), queries, atol=1e-6, rtol=0)
        assert torch.equal(GOLD[name][0, :, 1, 0], queries)
    assert bool((GOLD["w/rotary_emb.cos_cached"][0, :, 2] == 1).all() & (GOLD["w/rotary_emb.sin_cached"][0, :, 2] == 0).all())


def test_every_array_is_accounted_for() -> None:
    GOLD.account(
        compared=["logits", "logits_seq5", "hf/logits", "act/*", "w/rotary_emb.*", "n_heads", "max_seq_len",
                  "rounded_vocab_size"],
        inputs=["w/vocab_embed.*", "w/sigma_map.*", "w/blocks.*", "w/output_layer.*", "w/logit_bias", "input_ids", "t",
                "vocab_size"],
        left_out={})
