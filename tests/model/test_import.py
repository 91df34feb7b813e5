"""Checkpoints of others: what is read, what is refused, and that every verb understands the run they become."""
from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tdlm.config import BackboneConfig, TrainConfig
from tdlm.data.prepare import prepare
from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import RunError
from tdlm.evaluate.likelihood import evaluate_bound
from tdlm.model.imports import NEVER, read_checkpoint
from tdlm.rng import Draws
from tdlm.train.loop import train
from tdlm.train.metrics import Quiet
from tdlm.train.run import open_run
from tdlm.tree.embeddings import from_checkpoint
from tdlm.tree.tree import Tree
from tdlm.verbs.importing import import_gidd, import_run, tokenizer_of
from tests.rivals import dit_tensors, write_gidd, write_mdlm

GPT2 = Path(__file__).parents[1] / "fixtures" / "gpt2.tokenizer.json.xz"
BYTES = Tokenizer.from_bytes()
V = BYTES.size
BACKBONE = BackboneConfig(blocks=2, width=16, heads=2, condition_width=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published GIDD as the hub keeps it: weights, configuration, and a tokenizer in which MASK is a token."""
    made = tmp_path / "gidd-tiny"
    made.mkdir()
    write_gidd(made / "model.safetensors", BACKBONE, V)
    (made / "config.json").write_text(json.dumps({"vocab_size": V + 1, "max_seq_len": 16, "num_attention_heads": 2,
                                                  "p_uniform": 0.2}))
    data = json.loads(BYTES.to_json())
    mask = {**data["added_tokens"][-1], "id": V, "content": "[MASK]"}
    (made / "tokenizer.json").write_text(json.dumps({**data, "added_tokens": [*data["added_tokens"], mask]}))
    return made


def test_a_published_folder_becomes_a_run_that_scores_and_samples(folder: Path, tmp_path: Path) -> None:
    summary = import_run(f"gidd:{folder}", tmp_path / "run", command="tdlm import")
    run = open_run(tmp_path / "run")
    assert (run.config.method.kind, run.config.method.p_uniform, run.config.data.length) == ("gidd", 0.2, 16)
    assert run.tree.size == V == run.tokenizer.size and run.tree.root == V and run.step == 0 and run.tokenizer.hash == BYTES.hash
    assert run.provenance["imported"] == {"from": "gidd-tiny", "family": "gidd", "hash": summary["hash"], "unknown_tokens": []}
    assert str(tmp_path) not in json.dumps(run.provenance)
    rows = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    bound = evaluate_bound(run.assembly.model, run.assembly.objective, rows, batch=4, seed=0)
    assert 0 < bound.nats < 100 and bound.is_bound
    drawn = run.assembly.objective.sample(run.assembly.model, (2, 16), steps=4, draws=Draws(0, 0, "sample", torch.arange(2)))
    assert bool(((drawn.tokens >= 0) & (drawn.tokens < V)).all())
    with pytest.raises(RunError, match="is a run already"):
        import_run(folder, tmp_path / "run")


def test_the_weights_are_where_our_ids_want_them(folder: Path, tmp_path: Path) -> None:
    theirs = load_file(folder / "model.safetensors")
    config, tensors, tree = import_gidd(folder)
    assert (config.backbone, tree.size, tree.root) == (BACKBONE, V, V)
    embedding = tensors["backbone.embedding.weight"]
    assert torch.equal(embedding[: V + 1], theirs["vocab_embed.embedding"]) and embedding.shape == (384, 16)
    assert torch.equal(tensors["predictor.output.weight"], theirs["output_layer.linear.weight"][:V])
    rounded = {name: F.pad(value, (0, 0, 0, 384 - V - 1)) if value.ndim == 2 and len(value) == V + 1 else value
               for name, value in theirs.items()}
    rounded["output_layer.linear.bias"] = F.pad(theirs["output_layer.linear.bias"], (0, 384 - V - 1))
    save_file({**rounded, "logit_bias": torch.zeros(1, 1, 1)}, tmp_path / "training.safetensors")
    _, again, _ = import_gidd(tmp_path / "training.safetensors", tokens=V, p_uniform=0.0)
    assert set(again) == set(tensors) and all(torch.equal(value, tensors[name]) for name, value in again.items())
    with pytest.raises(RunError, match="how many of them are tokens"):
        import_gidd(tmp_path / "training.safetensors")
    with pytest.raises(RunError, match="uniform noise"):
        import_gidd(tmp_path / "training.safetensors", tokens=V)


def test_gpt2_ids_are_those_of_gidd() -> None:
    """50,257 ids, PAD 50257, MASK 50258: our star tree with V = 50,258, whose root is MASK."""
    tokenizer = Tokenizer.load(GPT2)
    star = Tree.star(tokenizer.size)
    assert (tokenizer.size, tokenizer.pad_id, star.root, star.nodes) == (50258, 50257, 50258, 50259)


def test_half_precision_and_several_files(folder: Path) -> None:
    whole = read_checkpoint(folder, tokens=V)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = sorted(tensors)
    for number, names in enumerate((halves[::2], halves[1::2])):
        save_file({name: tensors[name].to(torch.bfloat16) for name in names}, folder / f"model-{number}.safetensors")
    parts = read_checkpoint(folder, tokens=V)
    for name, value in whole.tensors.items():
        assert parts.tensors[name].dtype == torch.float32
        torch.testing.assert_close(parts.tensors[name], value, rtol=0.005, atol=1e-5)


def test_mdlm_is_told_nothing_and_knows_no_pad(tmp_path: Path) -> None:
    """Its constant condition is in the biases: the function is the one with time 0, to rounding."""
    write_mdlm(tmp_path / "mdlm.safetensors", BACKBONE, known=V - 1)
    held = read_checkpoint(tmp_path / "mdlm.safetensors", tokens=V)
    assert (held.family, held.missing, held.backbone.conditioning, held.backbone.heads) == ("mdlm", (V - 1,), "none", 2)
    assert bool((held.tensors["predictor.output.bias"][V - 1] == NEVER).all())
    plain = dit_tensors(BACKBONE, V)
    save_file({**plain, "rotary_emb.cos_cached": torch.ones(1, 16, 3, 1, 8)}, tmp_path / "as-gidd.safetensors")
    timed = read_checkpoint(tmp_path / "as-gidd.safetensors", tokens=V - 1)
    ours, theirs = (source.backbone.build(source.tokens + 1, 1) for source in (held, timed))
    for network, source in ((ours, held), (theirs, timed)):
        network.load_state_dict({name.removeprefix("backbone."): value for name, value in source.tensors.items()
                                 if name.startswith("backbone.")})
    tokens = torch.randint(0, V - 1, (2, 7), generator=torch.Generator().manual_seed(3))
    tokens[:, ::2] = -1  # MASK
    with torch.no_grad():
        got = ours(torch.where(tokens < 0, V, tokens), torch.rand(2), None)
        wanted = theirs(torch.where(tokens < 0, V - 1, tokens), torch.zeros(2), None)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_an_mdlm_that_is_told_sigma_is_refused(tmp_path: Path) -> None:
    write_mdlm(tmp_path / "model.safetensors", BACKBONE, known=V - 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mdlm", "time_conditioning": True}))
    with pytest.raises(RunError, match="sigma"):
        read_checkpoint(tmp_path, tokens=V)


def test_mdlm_becomes_a_run(tmp_path: Path) -> None:
    write_mdlm(tmp_path / "mdlm.safetensors", BACKBONE, known=V - 1)
    import_run(f"mdlm:{tmp_path / 'mdlm.safetensors'}", tmp_path / "run", tokenizer="bytes")
    run = open_run(tmp_path / "run")
    assert run.config.method.kind == "mdlm" and run.config.data.layout == "packed"
    rows = torch.randint(0, V - 1, (2, 16), generator=torch.Generator().manual_seed(0))
    bound = evaluate_bound(run.assembly.model, run.assembly.objective, rows, batch=2, seed=0, repeats=4)
    assert 0 < bound.nats < 100
    drawn = run.assembly.objective.sample(run.assembly.model, (3, 16), steps=8, draws=Draws(0, 0, "sample", torch.arange(3)))
    assert bool((drawn.tokens != BYTES.pad_id).all())


def test_mdlm_has_no_uniform_noise_to_be_told(tmp_path: Path) -> None:
    write_mdlm(tmp_path / "mdlm.safetensors", BACKBONE, known=V - 1)
    with pytest.raises(RunError, match="leave out --p-uniform"):
        import_run(tmp_path / "mdlm.safetensors", tmp_path / "run", tokenizer="bytes", p_uniform=0.1)
    assert not (tmp_path / "run").exists()


def test_it_is_not_continued_but_another_run_begins_with_it(folder: Path, tmp_path: Path) -> None:
    import_run(folder, tmp_path / "imported", command="tdlm import")
    (tmp_path / "text.jsonl").write_text('{"text": "a few words to train on"}\n' * 40)
    prepare([tmp_path / "text.jsonl"], tmp_path / "data", tokenizer=str(tmp_path / "imported" / "tokenizer.json"), valid=10)
    run = open_run(tmp_path / "imported")
    settings = {"data": tmp_path / "data", "device": "cpu", "progress": Quiet(), "command": "tdlm train"}
    with pytest.raises(RunError, match="data_fingerprint"):
        train(run.config, out=tmp_path / "imported", **settings)
    short = replace(run.config, train=TrainConfig(steps=2, batch=4, warmup=0, dtype="float32", save_every=2, valid_every=2))
    summary = train(short, out=tmp_path / "run", init=tmp_path / "imported", **settings)
    assert summary["steps"] == 2
    fresh = train(short, out=tmp_path / "fresh", **settings)
    assert summary["train"]["grad_norm"] != fresh["train"]["grad_norm"]


def test_the_tokenizer_beside_the_weights_loses_its_mask(folder: Path) -> None:
    assert Tokenizer.load(folder / "tokenizer.json").size == V + 1
    assert tokenizer_of(folder, None).hash == BYTES.hash == tokenizer_of(folder, folder / "tokenizer.json").hash
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RunError, match="--tokenizer"):
        tokenizer_of(folder, None)


def test_vectors_for_a_tree_come_from_the_same_file(folder: Path) -> None:
    """`vocab_embed.embedding` is among the names that are looked for; MASK and rounding are no tokens."""
    found = from_checkpoint(folder, V)
    assert found.source["tensor"] == "vocab_embed.embedding"
    assert np.array_equal(found.rows, load_file(folder / "model.safetensors")["vocab_embed.embedding"][:V].numpy())
    assert found.rows.shape == (V, 16) and found.source["rows"] == V + 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "last.ckpt", "model.pt"])
def test_pickles_are_not_opened(tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path(tmp_path / "ran").touch, ()

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(RunError, match=r"pickled checkpoints can run code") as caught:
            read_checkpoint(place, tokens=V)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_the_hub_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RunError, match=r"pip install 'tdlm\[hf\]'"):
        read_checkpoint("owner/model", tokens=V)

    class Hub:
        @staticmethod
        def snapshot_download(name: str, allow_patterns: list[str]) -> str:
            assert all("bin" not in pattern and pattern != "*.pt" for pattern in allow_patterns)
            raise OSError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub())
    with pytest.raises(RunError, match=r"could not be fetched.*\(no route\)") as caught:
        read_checkpoint("gidd:owner/model", tokens=V)
    assert "\n" not in str(caught.value)
    with pytest.raises(RunError, match="no checkpoint"):
        read_checkpoint("./nowhere", tokens=V)


@pytest.mark.parametrize(("change", "words"), [
    (lambda tensors: tensors.pop("output_layer.linear.bias"), "lacks 'output_layer.linear.bias'"),
    (lambda tensors: tensors.pop("vocab_embed.embedding"), "no checkpoint of GIDD or MDLM"),
    (lambda tensors: tensors.update({"lm_head.weight": torch.ones(2)}), "'lm_head.weight', which GIDD and MDLM do not have"),
    (lambda tensors: tensors.update(logit_bias=torch.ones(1, 1, 1)), "logit_bias is not zero"),
    (lambda tensors: tensors.pop("blocks.1.norm1.weight"), "does not fit the model at 'backbone.blocks.1.attention_norm.weight'"),
    (lambda tensors: tensors.pop("rotary_emb.cos_cached"), "--heads"),
])
def test_what_is_no_such_checkpoint_is_named(tmp_path: Path, change: Any, words: str) -> None:
    tensors = {**dit_tensors(BACKBONE, V + 1), "rotary_emb.cos_cached": torch.ones(1, 16, 3, 1, 8)}
    change(tensors)
    save_file(tensors, tmp_path / "them.safetensors")
    with pytest.raises(RunError, match=words) as caught:
        import_run(tmp_path / "them.safetensors", tmp_path / "run", tokenizer="bytes", p_uniform=0.0)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="another tokenizer"):
        import_run(folder, tmp_path / "run", tokenizer=GPT2)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        read_checkpoint(tmp_path / "broken.safetensors", tokens=V)
