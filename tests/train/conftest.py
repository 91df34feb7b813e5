"""A tiny prepared folder and a tree of its tokenizer, made once."""
from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.data.prepare import prepare
from tdlm.data.store import TokenStore
from tdlm.objectives.tree import TreeMethod
from tdlm.train.plan import complete_tree

CONFIG = RunConfig(
    "tiny", TreeMethod(), data=DataConfig(length=16), backbone=BackboneConfig(1, 16, 2, condition_width=8),
    train=TrainConfig(steps=12, warmup=2, batch=8, micro_batch=4, lr=0.01, dtype="float32", seed=3, log_every=3,
                      valid_every=5, valid_documents=6, save_every=4, keep=2))


def make_world(folder: Path) -> dict[str, Path]:
    """`data` and `tree` of a small random text."""
    words = ["tree", "leaf", "root", "branch", "bark", "seed", "twig"]
    chooser = random.Random(5)
    text = folder / "text.jsonl"
    lines = [f'{{"text": "{" ".join(chooser.choices(words, k=12))}"}}' for _ in range(60)]
    text.write_text("\n".join(lines) + "\n")
    prepare([text], folder / "data", tokenizer="bytes", valid=10)
    tokenizer = TokenStore(folder / "data").tokenizer
    replace(complete_tree(tokenizer.size, 17), tokenizer_hash=tokenizer.hash).save(folder / "tree.safetensors")
    return {"data": folder / "data", "tree": folder / "tree.safetensors"}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def config() -> RunConfig:
    return CONFIG
