"""The tables of a tree against a walk from the root, every invariant broken once, and the file."""
from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tdlm.errors import TokenizerError, TreeError
from tdlm.tree.build import build_tree
from tdlm.tree.tree import TABLES, Tree, split_bounds
from tests.worlds import trees

TREE = Tree.from_nested([[0, 1], [2, [3, 4]]])  # ids: 5 = (3 4), 6 = (0 1), 7 = (2 5), 8 = root


def paths(tree: Tree) -> dict[int, list[tuple[int, int]]]:
    """For every token the (node, slot taken) from the root down, found through `children` alone."""
    found: dict[int, list[tuple[int, int]]] = {}

    def walk(node: int, path: list[tuple[int, int]]) -> None:
        if node < tree.size:
            assert node not in found
            found[node] = path
            return
        for slot, child in enumerate(tree.children[node - tree.size].tolist()):
            if child >= 0:
                walk(child, [*path, (node, slot)])

    walk(tree.root, [])
    return found


def test_a_small_tree_by_hand():
    assert (TREE.size, TREE.height, TREE.nodes, TREE.branching, TREE.root) == (5, 3, 9, 2, 8)
    assert TREE.ancestor.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 5], [6, 6, 7, 7, 7], [8, 8, 8, 8, 8]]
    assert TREE.slot.tolist() == [[0, 0, 0, 0, 1], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert TREE.num_children.tolist() == [1] * 5 + [2] * 4
    assert TREE.children.tolist() == [[3, 4], [0, 1], [2, 5], [6, 7]]
    assert TREE.node_height().tolist() == [0] * 5 + [1, 2, 2, 3]
    assert TREE.leaf_counts().tolist() == [1] * 5 + [2, 2, 3, 5]
    assert TREE.mass(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [1, 2, 4, 8, 16, 24, 3, 28, 31]


@given(trees())
def test_ancestors_and_slots_are_the_walk_from_the_root(tree: Tree):
    found = paths(tree)
    assert sorted(found) == list(range(tree.size))
    for token, path in found.items():
        padding = tree.height - len(path)
        assert tree.ancestor[:, token].flip(0).tolist() == [node for node, _ in path] + [token] * (padding + 1)
        assert tree.slot[:, token].flip(0).tolist() == [slot for _, slot in path] + [0] * padding
    below = {node: sum(node in dict(path) for path in found.values()) for node in range(tree.size, tree.nodes)}
    assert tree.leaf_counts()[tree.size:].tolist() == list(below.values())
    assert tree.node_height()[tree.size:].tolist() == sorted(tree.node_height()[tree.size:].tolist())


@given(trees(), st.text("0123456789abcdef", max_size=32))
def test_a_file_brings_the_tree_back(tree: Tree, tokenizer_hash: str):
    tree = replace(tree, tokenizer_hash=tokenizer_hash, meta={"method": "drawn", "seed": 3})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.safetensors"
        tree.save(path)
        again = Tree.load(path, tokenizer_hash=tokenizer_hash)
        assert again.to_bytes() == path.read_bytes() and list(path.parent.iterdir()) == [path]
    assert all(torch.equal(getattr(tree, name), getattr(again, name)) for name in TABLES)
    assert (again.tokenizer_hash, again.meta) == (tokenizer_hash, tree.meta)


def broken(name: str, *changes: tuple[tuple[int, ...], int]) -> Tree:
    """TREE with some numbers of one table changed."""
    table: Tensor = getattr(TREE, name).clone()
    for place, value in changes:
        table[place] = value
    return replace(TREE, **{name: table})


@pytest.mark.parametrize("tree, says", [
    (broken("ancestor", ((0, 2), 3)), "node 2"),
    (broken("ancestor", ((3, 4), 7)), "node 4 does not hang under the root"),
    (broken("ancestor", ((1, 2), 1)), "node 1 at height 1 must repeat its token"),
    (broken("slot", ((0, 1), 1)), "node 1 at height 1 must repeat its token"),
    (broken("slot", ((2, 2), 2)), "node 8 has a child in an empty slot"),
    (broken("slot", ((2, 2), -1)), "node 8 has a child in an empty slot"),
    (broken("slot", ((0, 4), 0)), "node 5 does not list its child"),
    (broken("ancestor", ((2, 2), 6)), "node 6 does not list its child"),
    (broken("children", ((1, 0), 1), ((1, 1), 0)), "node 6 does not list its child"),
    (broken("children", ((2, 1), -1)), "node 7"),
    (broken("children", ((3, 0), 9)), "node 8"),
    (broken("ancestor", ((1, 3), 9)), "node 3"),
    (broken("num_children", ((3,), 2)), "node 3"),
    (broken("num_children", ((5,), 0)), "node 5"),
    (broken("num_children", ((8,), 3)), "node 8"),
    (replace(TREE, slot=TREE.slot[:2]), "shapes do not fit"),
    (replace(TREE, children=TREE.children[:3]), "shapes do not fit"),
    (replace(TREE, children=TREE.children.flatten()), "shapes do not fit"),
    (replace(TREE, num_children=TREE.num_children[None]), "shapes do not fit")])
def test_every_broken_table_is_an_error_that_names_the_node(tree: Tree, says: str):
    with pytest.raises(TreeError, match=says) as caught:
        tree.check()
    assert "build it again" in str(caught.value) or "build the tree again" in str(caught.value)


def test_a_gap_among_the_children_and_a_child_of_two_nodes():
    wide = Tree.from_nested([[0, 1], [2, 3]], branching=3)
    gap = wide.children.clone()
    gap[2] = torch.tensor([4, -1, 5])
    slots = wide.slot.clone()
    slots[1, 2:] = 2
    with pytest.raises(TreeError, match="node 6"):
        replace(wide, children=gap, slot=slots).check()
    twice = wide.children.clone()
    twice[2, 2] = 3
    more = wide.num_children.clone()
    more[6] = 3
    with pytest.raises(TreeError, match="node 3 is the child of 2 nodes"):
        replace(wide, children=twice, num_children=more).check()


def test_nodes_apart_from_the_tree_and_nodes_out_of_order():
    ring = torch.cat([TREE.children[:3], torch.tensor([[9, -1], [8, -1]]), TREE.children[3:]])  # 8 and 9: each other's child
    lost = replace(TREE, children=ring, num_children=torch.tensor([1] * 5 + [2, 2, 2, 1, 1, 2]),
                   ancestor=torch.where(TREE.ancestor == 8, 10, TREE.ancestor))
    with pytest.raises(TreeError, match="node 8 has no token below it"):
        lost.check()
    swap = torch.tensor([0, 1, 2, 3, 4, 6, 5, 7, 8])  # the node of height 1 after one of height 2
    mixed = replace(TREE, ancestor=swap[TREE.ancestor], num_children=TREE.num_children[swap],
                    children=swap[TREE.children][[1, 0, 2, 3]])
    with pytest.raises(TreeError, match="node 6"):
        mixed.check()


def halves(tokens: list[int]) -> Any:
    """Nested lists of at most two items, as even as can be."""
    if len(tokens) == 1:
        return tokens[0]
    return [halves(tokens[: (len(tokens) + 1) // 2]), halves(tokens[(len(tokens) + 1) // 2:])]


@pytest.mark.parametrize("first, says", [(8, None), (9, None), (6, "into 2 children of 6..10 tokens"),
                                         (11, "5..11 tokens"), (14, "2..14 tokens")])
def test_the_sizes_that_were_asked_for(first: int, says: str | None):
    """16 tokens in two: 6 to 9 are allowed at 0.8 to 1.2."""
    bounds = {"exact": True, "min_ratio": 0.8, "max_ratio": 1.2, "height": None}
    tree = Tree.from_nested([halves(list(range(first))), halves(list(range(first, 16)))], meta={"bounds": bounds})
    if says is None:
        tree.check()
        return
    with pytest.raises(TreeError, match=rf"node {tree.root} splits 16 tokens .*{says}.* outside the bounds 6..9"):
        tree.check()
    replace(tree, meta={"bounds": {**bounds, "exact": False}}).check()
    replace(tree, meta={}).check()


@given(st.integers(2, 60_000), st.integers(2, 600), st.sampled_from([(0.8, 1.2), (0.0, 2.0), (1.0, 1.0), (0.5, 1.0)]),
       st.none() | st.integers(1, 300))
def test_split_bounds_is_the_formula(size: int, k: int, ratios: tuple[float, float], room: int | None):
    mean = size / k
    low, high = split_bounds(size, k, *ratios, room)
    assert low == max(1, math.floor(ratios[0] * mean))
    uncapped = max(math.ceil(mean), math.floor(ratios[1] * mean))
    assert high == (uncapped if room is None else min(uncapped, room))
    if room is None and size >= k:
        assert low * k <= size <= high * k, "without a cap a split is always possible"


def test_split_bounds_in_numbers():
    assert split_bounds(50_258, 512, 0.8, 1.2) == (78, 117)
    assert split_bounds(50_258, 225, 0.8, 1.2, 225) == (178, 225)
    assert split_bounds(50_258, 2, 0.8, 1.2) == (20_103, 30_154)
    assert split_bounds(10, 9, 0.8, 1.2) == (1, 2)


@pytest.mark.parametrize("nested, says", [
    ([], "a list of nodes and token ids"), (7, "a list of nodes and token ids"), ([[0, 1], []], "without children"),
    ([0, 1, 1], "token 1 is a leaf 2 times"), ([0, 2], "token 2 is outside the vocabulary 0..1"),
    ([0, -1], "token -1 is outside"), ([[0, 1, 2]], "more than the branching factor K=2")])
def test_nested_lists_that_are_no_tree(nested: Any, says: str):
    with pytest.raises(TreeError, match=says):
        Tree.from_nested(nested, branching=2 if says.startswith("more") else None)


def test_tokens_missing_and_the_star():
    with pytest.raises(TreeError, match="token 2 is a leaf 0 times"):
        Tree.from_nested([0, 1, 3], size=4)
    star = Tree.star(6, "abc").check()
    assert (star.height, star.branching, star.root, star.tokenizer_hash) == (1, 6, 6, "abc")
    assert star.children.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_tree_of_another_tokenizer_is_refused(tmp_path: Path):
    replace(TREE, tokenizer_hash="aaaa").save(tmp_path / "tree")
    Tree.load(tmp_path / "tree")
    with pytest.raises(TokenizerError, match=r"tokenizer aaaa, the data uses bbbb.*tdlm tree build"):
        Tree.load(tmp_path / "tree", tokenizer_hash="bbbb")


def test_files_that_are_no_tree(tmp_path: Path):
    whole = TREE.to_bytes()
    files = {"missing": None, "empty": b"", "text": b"not a tree at all, but some words", "short": whole[:-3],
             "head": whole[:20]}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TreeError, match="tdlm tree build" if content is None else "cannot be read as a tree"):
            Tree.load(tmp_path / name)
    tables = {name: getattr(TREE, name) for name in TABLES}
    for name, header in (("none", None), ("other", {"tdlm": json.dumps({"format": "tdlm-tree-99"})}),
                         ("list", {"tdlm": "[]"}), ("broken", {"tdlm": "{"})):
        save_file(tables, tmp_path / name, metadata=header)
        with pytest.raises(TreeError, match=r"is no tree of format|cannot be read as a tree"):
            Tree.load(tmp_path / name)
    good = {"tdlm": json.dumps({"format": "tdlm-tree-1", "tokenizer_hash": "", "meta": {}})}
    save_file({name: tables[name] for name in TABLES[:3]}, tmp_path / "three", metadata=good)
    with pytest.raises(TreeError, match="cannot be read as a tree"):
        Tree.load(tmp_path / "three")


def test_a_flipped_number_in_a_file_is_found(tmp_path: Path):
    """Every number of the tables is covered by some invariant."""
    content = TREE.to_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for place in range(start, len(content), 4):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "tree").write_bytes(changed)
        with pytest.raises(TreeError):
            Tree.load(tmp_path / "tree")


def test_a_built_tree_moves_and_saves_the_same(tmp_path: Path):
    tree = build_tree(None, method="random", branching=3, size=20)
    assert tree.to("cpu").check().to_bytes() == tree.to_bytes()
    tree.save(tmp_path / "a folder" / "tree")
    assert Tree.load(tmp_path / "a folder" / "tree").meta == tree.meta
