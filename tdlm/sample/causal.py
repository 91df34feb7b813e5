"""Ancestral sampling from left to right: one token after another, each down the tree with one answer of the network.

The network reads the root's id and the prompt in one call, then every new token alone: it keeps the keys and values of
what it has read (a network without such a memory reads the whole text again). The head is asked once per level, the
network once per token, so a sample of S tokens behind a prompt of P takes S - P evaluations *whatever `steps` says*; the
result reports them. A left-to-right model cannot look ahead: what is given must be the beginning of every row, of any
length (rows with a longer prompt are read on while the others are made). Nothing ends at EOS: the length is fixed, and
PAD may be drawn.

Temperature, top-p and min-p act on each choice of a child; on the star tree that is the choice of the token. Draws are
float64 inversions and a pure function of (seed, sample number, position, level).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import SampleError
from ..model.causal import Cache
from ..model.model import Network, autocast
from ..rng import Draws, sent
from ..tree.tree import Tree
from .draw import Choice, Frame, Sampled, at_home, fixed_tokens, invert
from .walk import choices_by_height


@torch.no_grad()
def generate_left_to_right(model: Network, tree: Tree, shape: tuple[int, int], *, steps: int, draws: Draws,
                           prefix: Tensor | None = None, given: Tensor | None = None, shown: Tensor | None = None,
                           per_level: Sequence[int] | None = None, times: Sequence[float] | None = None,
                           choice: Choice = Choice(), dtype: str = "float32", trace: bool = False,  # noqa: B008 - frozen
                           progress: Callable[[int, int], None] | None = None) -> Sampled:
    """Draw `shape` = (B, S) tokens; `prefix` (P,) or (B, P) and `given` (B, S), -1 where text is to be made, are prompts."""
    if per_level is not None or times is not None:
        raise SampleError("a left-to-right model makes one token after another and has no time to divide; "
                          "leave out the steps per level and the grid of times")
    if shown is not None:
        raise SampleError("a left-to-right model sees the text so far and nothing else; leave out the tokens to be shown")
    fixed = fixed_tokens(shape, prefix, given, tree.size, tree.ancestor.device)
    prompt = prompt_lengths(fixed)
    first, length = int(prompt.min()), shape[1]
    text = torch.cat([torch.full_like(fixed[:, :1], tree.root), fixed], 1)
    frames = [_frame(text, tree, 0)] if trace else []
    read, draws, choices = _reader(model, length), at_home(draws), choices_by_height(tree.to("cpu"))
    with autocast(text.device, dtype):
        for position in range(first, length):
            uniform = sent(draws.uniform(f"position {position}", tree.height), text.device)
            drawn = _draw_token(model, tree, choices, read(text[:, : position + 1]), uniform, choice)
            text[:, position + 1] = torch.where(position < prompt, fixed[:, position], drawn)
            if trace:
                frames.append(_frame(text, tree, max(0, position + 1 - int(prompt[0]))))
            if progress is not None:
                progress(position + 1 - first, length - first)
    return Sampled(text[:, 1:], length - prompt, length - first, length - first, frames)


def prompt_lengths(fixed: Int[Tensor, "B S"]) -> Int[Tensor, "B"]:
    """How many tokens each row begins with; an error when one is given behind a gap."""
    given = fixed >= 0
    prompt = given.long().cumprod(1).sum(1)
    if bool((behind := given.sum(1) > prompt).any()):
        row = int(behind.nonzero()[0])
        raise SampleError("a left-to-right model cannot look ahead: given tokens must be the beginning of the text, but sample "
                          f"{row} has one behind a gap at position {int(prompt[row])}; give a prompt, or fill gaps with a "
                          "diffusion run")
    return prompt


def _reader(model: Network, length: int) -> Callable[[Tensor], Tensor]:
    """Ids so far (B, n) -> the hidden state of the last one (B, d), reading only what is new when the network can."""
    backbone = getattr(model, "backbone", None)
    if getattr(backbone, "caches", False):
        cache = Cache(length)
        return lambda ids: backbone(ids[:, cache.seen:], cache=cache)[:, -1]  # pyright: ignore[reportOptionalCall]
    return lambda ids: model.hidden(ids, torch.zeros(len(ids), dtype=torch.float64, device=ids.device), None)[:, -1]


def _draw_token(model: Network, tree: Tree, choices: Bool[Tensor, "heights"] | None, hidden: Float[Tensor, "B d"],
                uniform: Float[Tensor, "B H"], choice: Choice) -> Int[Tensor, "B"]:
    """From the root down: at every node with a choice the head says which child."""
    node = torch.full((len(hidden),), tree.root, device=hidden.device)
    for level in reversed(range(tree.height)):
        slot = torch.zeros_like(node)
        if choices is None:  # nodes of one height differ: the processor waits to see which ask
            row = (tree.num_children[node] > 1).nonzero()[:, 0]
        else:
            row = torch.arange(len(node) if choices[level + 1] else 0, device=node.device)
        if len(row):
            log_probs = model.head.log_probs(hidden[row], node[row])
            slot[row] = invert(choice.probabilities(log_probs), uniform[row, level])
        below = tree.children[(node - tree.size).clamp(min=0), slot]
        node = torch.where(node >= tree.size, below, node)
    return node


def _frame(text: Tensor, tree: Tree, evaluations: int) -> Frame:
    """The first sequence: tokens where there is text, the root where there is none yet, and the share of those."""
    nodes = [tree.root if token < 0 else token for token in text[0, 1:].tolist()]
    heights = [tree.height if node == tree.root else 0 for node in nodes]
    return Frame(heights.count(tree.height) / len(heights), evaluations, heights, nodes)
