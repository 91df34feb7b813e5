"""A little text, prepared once, and wishes that make any toy study a matter of seconds."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tdlm.data.prepare import prepare
from tdlm.study import Wishes

SMALL = ("train.steps=3", "train.batch=4", "train.valid_documents=4", "data.length=16", "backbone.heads=2", "backbone.blocks=1",
         "backbone.width=16")
TINY = Wishes(settings=SMALL)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of made-up sentences as bytes, five of them for validation."""
    place, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["the", "tree", "leaf", "root", "and", "a", "branch", "grows", "seed", "falls"]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=10)) + "."}) for _ in range(40)]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n")
    prepare([place / "text.jsonl"], place / "data", tokenizer="bytes", valid=5)
    return place / "data"
