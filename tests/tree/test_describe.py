"""What is said about a tree, against numbers worked out by hand, and its picture."""
from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import TreeError
from tdlm.tree.build import build_tree
from tdlm.tree.describe import describe, render, show
from tdlm.tree.picture import tree_svg
from tdlm.tree.tree import Tree
from tests.worlds import trees

TREE = Tree.from_nested([[0, 1], [2, [3, 4, 5]]], branching=4)  # 6 = (3 4 5), 7 = (0 1), 8 = (2 6), 9 = root
COUNTS = np.array([4, 4, 4, 2, 1, 1])  # of 16


def entropy(*counts: int) -> float:
    return -sum(n / sum(counts) * math.log(n / sum(counts)) for n in counts if n)


def test_every_number_by_hand():
    found = describe(TREE, COUNTS)
    assert (found["tokens"], found["branching"], found["height"], found["nodes"], found["internal"]) == (6, 4, 3, 10, 4)
    assert found["weighted_by"] == "counts" and found["padded_tokens"] == 3
    assert found["active_levels"] == {"min": 2, "mean": 2.5, "max": 3, "expected": 2 * 12 / 16 + 3 * 4 / 16}
    root, middle, leaf = found["levels"]
    assert [level["height"] for level in (root, middle, leaf)] == [3, 2, 1]
    assert [level["nodes"] for level in (root, middle, leaf)] == [1, 2, 1]
    assert [level["padded_paths"] for level in (root, middle, leaf)] == [0, 0, 3]
    assert root["children"] == {"min": 2, "mean": 2, "max": 2} and root["tokens"] == {"min": 6, "mean": 6, "max": 6}
    assert root["child_tokens"] == {"min": 2, "mean": 3, "max": 4}
    assert middle["tokens"] == {"min": 2, "mean": 3, "max": 4} and middle["child_tokens"] == {"min": 1, "mean": 1.5, "max": 3}
    assert [level["utilisation"] for level in (root, middle, leaf)] == [0.5, 0.5, 0.75]
    assert [level["reached"] for level in (root, middle, leaf)] == [1, 1, 0.25]
    assert [level["uniform"] for level in (root, middle, leaf)] == pytest.approx([math.log(2), math.log(2), 0.25 * math.log(3)])
    assert [level["unigram"] for level in (root, middle, leaf)] == pytest.approx(
        [entropy(8, 8), 0.5 * entropy(4, 4) + 0.5 * entropy(4, 4), 0.25 * entropy(2, 1, 1)])
    assert found["uniform"] == pytest.approx(2 * math.log(2) + 0.25 * math.log(3))
    assert found["unigram"] == pytest.approx(entropy(*COUNTS))
    json.dumps(found)


def test_without_counts_every_token_counts_once():
    found, even = describe(TREE), describe(TREE, np.ones(6))
    assert found["weighted_by"] == "vocabulary" and found["unigram"] == pytest.approx(math.log(6))
    assert found["levels"] == even["levels"] == describe(TREE, np.zeros(6))["levels"]
    with pytest.raises(TreeError, match="counts are for 5 tokens, the tree has 6"):
        describe(TREE, COUNTS[:5])


@settings(max_examples=40)
@given(trees(), st.integers(0, 99))
def test_the_levels_add_up_to_the_entropy_of_the_unigram_distribution(tree: Tree, seed: int):
    counts = np.random.default_rng(seed).integers(0, 4, tree.size)
    counts[0] += 1
    found = describe(tree, counts)
    assert sum(level["unigram"] for level in found["levels"]) == pytest.approx(entropy(*counts), abs=1e-9)
    assert found["uniform"] >= found["unigram"] - 1e-9
    path = [sum(math.log(int(tree.num_children[node])) for node in set(tree.ancestor[1:, x].tolist())) for x in range(tree.size)]
    assert found["uniform"] == pytest.approx(np.dot(path, counts) / counts.sum())


def text_of(description: dict[str, Any], width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(description))
    return out.getvalue()


def test_what_a_person_reads():
    tokenizer = Tokenizer.from_bytes()
    counts = np.zeros(tokenizer.size, dtype=np.int64)
    counts[list(b"hello  \n")] += 1
    counts[list(b"e")] += 9
    tree = build_tree(None, size=tokenizer.size, branching=8, method="frequency", counts=counts)
    found = describe(tree, counts, tokenizer)
    text = text_of(found)
    assert "258 tokens, K=8, height 3" in text and "frequency, sizes 0.8 to 1.2 of the mean" in text
    assert "3 → 2" in text and "1 → 0" in text and "100.0%" in text
    assert [example["share"] for example in found["examples"]] == sorted((e["share"] for e in found["examples"]), reverse=True)
    assert found["examples"][0]["most_frequent"][0] == "e"
    assert (show(32, tokenizer), show(10, tokenizer), show(9, tokenizer), show(7, tokenizer)) == ("␣", "⏎", "⇥", r"\x07")
    assert show(200, tokenizer) == r"\xc8" and show(7, None) == "7"
    assert "by hand" in text_of(describe(TREE)) and "cluster" in text_of(describe(TREE))
    assert describe(TREE, examples=0)["examples"] == []


def test_a_large_tree_fits_an_ordinary_terminal_and_a_narrow_one_loses_no_digit():
    found = describe(build_tree(None, size=50_258, branching=4, method="random"), examples=0)
    levels = [line.split() for line in text_of(found, 80).splitlines() if " → " in line]
    assert levels[0][3:] == ["1", "4", "12,564–12,565", "12,564", "100.0%", "100.0%", "1.386", "1.386"]
    assert levels[-1][3:7] == ["16,384", "3–4", "3.1", "1"]
    narrow = text_of(found, 60)
    assert "…" not in narrow[narrow.index("8 → 7"):] and max(map(len, narrow.splitlines())) <= 60


def rectangles(svg: str) -> list[tuple[float, float, float, float]]:
    space = "{http://www.w3.org/2000/svg}"
    return [tuple(float(each.get(name, "nan")) for name in ("x", "y", "width", "height"))  # pyright: ignore[reportReturnType]
            for each in ElementTree.fromstring(svg).iter(f"{space}rect") if each.get("rx")]


def test_the_picture_holds_every_cluster_once():
    tokenizer = Tokenizer.from_bytes()
    counts = np.random.default_rng(0).integers(0, 50, tokenizer.size)
    tree = build_tree(None, size=tokenizer.size, branching=16, method="frequency", counts=counts)
    svg = tree_svg(tree, tokenizer, counts)
    boxes = rectangles(svg)
    assert len(boxes) == tokenizer.size, "few enough tokens for a cell each"
    area = sum(w * h for _, _, w, h in boxes)
    assert 0.8 * 920 * 674 < area <= 920 * 674 * 1.01
    for i, (x, y, w, h) in enumerate(boxes):
        assert 19.9 <= x <= x + w <= 940.2 and 65.9 <= y <= y + h <= 740.2
        for a, b, c, d in boxes[:i]:
            assert x + w <= a + 0.15 or a + c <= x + 0.15 or y + h <= b + 0.15 or b + d <= y + 0.15, "cells do not overlap"
    assert "<script" not in svg and "&lt;" in svg and svg == tree_svg(tree, tokenizer, counts)
    assert f"{describe(tree, counts)['unigram']:.2f} in all" in svg


@pytest.mark.parametrize("tree", [TREE, Tree.star(5), Tree.from_nested([[0], [[1]]]),
                                  build_tree(None, size=3000, branching=2, method="random"),
                                  build_tree(None, size=3000, branching=1000, method="random"), Tree.star(2000)],
                         ids=["small", "star", "chains", "binary", "wide", "wide star"])
def test_pictures_of_unusual_trees(tree: Tree):
    boxes = rectangles(tree_svg(tree))
    assert 1 <= len(boxes) <= 640 and all(w > 0 and h > 0 for _, _, w, h in boxes)
    assert rectangles(tree_svg(tree, counts=np.zeros(tree.size)))


def test_only_the_most_frequent_clusters_of_a_wide_tree_are_shown():
    counts = np.arange(2000)
    svg = tree_svg(Tree.star(2000), counts=counts)
    assert "the 640 most frequent of 2,000 tokens" in svg and ">1999<" in svg and ">1359<" not in svg
    assert "6 tokens in a tree of 3 levels" in tree_svg(TREE) and "The map shows 6 tokens" in tree_svg(TREE)
