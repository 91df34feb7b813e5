"""The trees of the paper's tables on GPT-2's vocabulary, clustered from its own embedding (64 dimensions)."""
from __future__ import annotations

from pathlib import Path

import pytest

from tdlm.data.tokenizer import Tokenizer
from tdlm.tree.build import build_tree
from tdlm.tree.embeddings import Vectors, from_array
from tdlm.tree.tree import Tree
from tests.tree.test_build import check_splits

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return from_array(FIXTURES / "gpt2-vocab-embed64.npz", 50_258)


@pytest.mark.slow
def test_k_512(vectors: Vectors, tmp_path: Path):
    """Height 2, N = 50,771, every split in bounds, words of a kind in few clusters."""
    tokenizer = Tokenizer.load(FIXTURES / "gpt2.tokenizer.json.xz")
    tree = build_tree(vectors, branching=512, size=tokenizer.size, tokenizer_hash=tokenizer.hash)
    assert (tree.height, tree.nodes, tree.root) == (2, 50_771, 50_770) and check_splits(tree) == 1
    level = tree.meta["levels"][0]
    assert (level["lo"], level["hi"], level["outside"]) == (78, 117, 0) and tree.meta["without_vector"] == 22
    assert level["inertia"] < 1.01 * 35_375, "unconstrained K-means of the same vectors: benchmarks/results/tree.json"

    def cluster(text: str) -> int:
        (token,) = tokenizer.encode(text).tolist()
        return int(tree.ancestor[1, token])

    kinds = ("Monday Tuesday Wednesday Thursday Friday Saturday", "January February March April June July August",
             "Germany France Italy Spain Japan China")
    for words in kinds:  # 64 dimensions in 8 bits do not keep them all together, but 512 clusters could be 6
        assert len({cluster(f" {word}") for word in words.split()}) <= 3, words
    tree.save(tmp_path / "tree")
    assert Tree.load(tmp_path / "tree", tokenizer.hash).to_bytes() == tree.to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("k, asked, height", [(256, None, 2), (225, 2, 2), (225, None, 3), (37, 3, 3), (37, None, 4),
                                              (2, None, 19)])
def test_other_branching_factors(vectors: Vectors, k: int, asked: int | None, height: int):
    tree = build_tree(vectors, branching=k, size=50_258, height=asked)
    assert tree.height == height and check_splits(tree, height=asked)
