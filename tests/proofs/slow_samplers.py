"""Samplers without any haste: one sequence at a time, one position after another, every position asked about in every step.

They take the same numbers as the product's samplers and must come to the same tokens.
"""
from __future__ import annotations

import torch
from torch import Tensor

from tdlm.process import Process
from tdlm.process.flat import Hybrid, marginal
from tdlm.rng import Draws
from tdlm.sample import Choice
from tdlm.sample.grid import times_for
from tdlm.tree import Tree


def first_above(p: Tensor, uniform: float) -> int:
    """The outcome whose stretch of the cumulative distribution holds `uniform`."""
    cumulative = p.double().cumsum(0)
    return next(k for k, edge in enumerate(cumulative.tolist()) if uniform * float(cumulative[-1]) < edge)


@torch.no_grad()
def ancestral(model, process: Process, tree: Tree, shape: tuple[int, int], steps: int, draws: Draws,
              given: Tensor | None = None, times: list[float] | None = None,
              choice: Choice = Choice()) -> tuple[list[list[int]], list[int]]:  # noqa: B008 - frozen
    """Tokens and evaluations of each sequence."""
    fixed = torch.full(shape, -1) if given is None else given
    made = [_descend(model, process, tree, fixed[row].tolist(), times_for(process, tree.height, steps, None, times),
                     draws.part(slice(row, row + 1)), choice) for row in range(shape[0])]
    return [nodes for nodes, _ in made], [count for _, count in made]


def _descend(model, process: Process, tree: Tree, given: list[int], grid: list[float], draws: Draws,
             choice: Choice) -> tuple[list[int], int]:
    H, S = tree.height, len(given)
    heights, nodes, evaluations, segment = [H] * S, [tree.root] * S, 0, 0
    for number, (t, s) in enumerate(zip(grid, grid[1:])):
        for high, low in process.segments(t, s, H):
            floor, level = process.clamp_height(high, H), process.level_at(high, H)
            for i, token in enumerate(given):
                if token >= 0:
                    heights[i], nodes[i] = floor, int(tree.ancestor[floor, token])
            reach, uniform = process.reverse(high, low, H).cumsum(1), draws.uniform(f"height {number} {segment}", S)[0]
            goal = [min(h, int((uniform[i] >= reach[h]).sum())) if given[i] < 0 else h for i, h in enumerate(heights)]
            turn = 0
            while falling := [i for i in range(S) if heights[i] > goal[i]]:
                child, seen = draws.uniform(f"child {number} {segment} {turn}", S)[0], list(nodes)
                real = [i for i in falling if int(tree.num_children[seen[i]]) > 1]
                hidden = None
                if real:
                    evaluations += 1
                    time = torch.tensor([high], dtype=torch.float64)
                    hidden = model.hidden(torch.tensor([seen]), time, torch.tensor([level]))[0]
                for i in falling:
                    heights[i] -= 1
                    if i in real:
                        assert hidden is not None
                        p = choice.probabilities(model.head.log_probs(hidden[i:i + 1], torch.tensor([seen[i]])))[0]
                        nodes[i] = int(tree.children[seen[i] - tree.size, first_above(p, float(child[i]))])
                    elif seen[i] >= tree.size:
                        nodes[i] = int(tree.children[seen[i] - tree.size, 0])
                turn += 1
            segment += 1
    floor_tokens = [token if token >= 0 else node for token, node in zip(given, nodes)]
    return floor_tokens, evaluations


@torch.no_grad()
def gidd(model, process: Hybrid, shape: tuple[int, int], grid: list[float], draws: Draws, given: Tensor | None = None,
         choice: Choice = Choice()) -> list[list[int]]:  # noqa: B008 - frozen
    """Every position of every step from its whole row q_s(. | x_theta), whether it stays or not."""
    (B, S), V = shape, process.size
    fixed = torch.full(shape, -1) if given is None else given
    state = torch.where(fixed >= 0, fixed, V)
    for number, (t, s) in enumerate(zip(grid, grid[1:])):
        times = torch.tensor([s, t], dtype=torch.float64)
        keep, to_mask, to_each = process.between(times[0], times[1])
        at = process.at(times[:1])
        uniform = draws.uniform(f"token {number}", S, 2)
        hidden = model.hidden(state, torch.full((B,), t, dtype=torch.float64), None)
        after = state.clone()
        for b in range(B):
            p = choice.probabilities(model.head.log_probs(hidden[b], torch.full((S,), V)))
            q = marginal(type(at)(*(number.expand(S) for number in at)), p)
            for i in range(S):
                z, (u, fresh) = int(state[b, i]), uniform[b, i].tolist()
                to = float(to_mask if z == V else to_each)
                if fixed[b, i] >= 0 or u * (to + float(keep) * float(q[i, z])) >= to:
                    continue
                if fresh < float(at.keep):
                    after[b, i] = first_above(p[i], fresh / float(at.keep))
                else:
                    noise = fresh - float(at.keep)
                    after[b, i] = V if fresh >= 1 - float(at.mask) else min(int(noise / float(at.each)), V - 1)
        state = after
    return state.tolist()
