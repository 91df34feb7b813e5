"""A causal language model without transformers: a table, called as transformers' models are called.

The logits at position i depend on token i and on the mean of all tokens that the window shows up to i, so that cutting
the context changes the numbers."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tdlm.evaluate.judge import Judge

SIZE = 258


class Toy:
    def __init__(self, size: int = SIZE, positions: int | None = None, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.past = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.positions, self.shapes = positions, []

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True,
                 output_hidden_states: bool = False) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        assert self.positions is None or input_ids.shape[1] <= self.positions, "more tokens than positions"
        if attention_mask is not None:  # PAD stands behind the text
            assert bool((attention_mask.diff(dim=1) <= 0).all()) and attention_mask.shape == input_ids.shape
        count = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64)[:, None]
        hidden = self.table[input_ids] + self.past[input_ids].cumsum(1) / count
        return SimpleNamespace(logits=hidden, hidden_states=(hidden,) if output_hidden_states else None)

    def nats(self, before: list[int], token: int) -> float:
        """-log p(token | exactly these tokens), written down a second time."""
        logits = self.table[before[-1]] + sum(self.past[one] for one in before) / len(before)
        return float(torch.logsumexp(logits, 0) - logits[token])


def byte_names() -> dict[str, int]:
    """Names and ids of the built-in byte tokenizer."""
    from tdlm.data.tokenizer import Tokenizer

    return Tokenizer.from_bytes()._vocabulary


def toy_judge(positions: int | None = None, *, shift: int = 0, start: int | None = 256, model: Toy | None = None) -> Judge:
    """A judge with the ids of the byte tokenizer, or (`shift`) with others for the same bytes."""
    model = model or Toy(positions=positions)
    names = {name: (number + shift) % 256 if number < 256 else number for name, number in byte_names().items()}
    return Judge("toy", model, lambda text: [(byte + shift) % 256 for byte in text.encode()], names, start, start, positions)
