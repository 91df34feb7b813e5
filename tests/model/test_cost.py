"""The benchmark of head and attention alone (benchmarks/cost.py): it measures what it says."""
from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from benchmarks import cost

OPTIONS = argparse.Namespace(batch=4, length=16, width=64, repeats=1)


@pytest.mark.parametrize("method, k", [("tied", 16), ("shared", 16), ("overlapping", 16), ("mdlm", 0), ("mdlm-tied", 0),
                                       ("mdlm-wide", 0)])
def test_a_case_is_the_loss_of_the_method_and_its_whole_gradient(method: str, k: int):
    model, act = cost.prepare_head(method, 60, k, OPTIONS, torch.device("cpu"))
    act()
    assert float(model.backbone.leaf.grad.abs().sum()) > 0
    seen = {name: (weight.grad.abs().sum(-1) > 0).nonzero()[:, 0].tolist() for name, weight in model.named_parameters()
            if weight.ndim == 2 and weight.grad is not None}
    (name, rows), = seen.items()
    if k and method != "shared":  # 16 groups stand below the root, and the tokens of those that were met
        assert name == "backbone.embedding.weight" and set(range(60, 76)) < set(rows) <= set(range(76))
    else:
        assert name == ("backbone.embedding.weight" if method == "mdlm-tied" else "predictor.output.weight")
        assert rows == list(range(k or 60))


@pytest.mark.parametrize("method, k", [("tied", 16), ("mdlm-wide", 0)])
def test_what_is_told_of_a_case(method: str, k: int):
    row = cost.measure_head(method, 60, k, OPTIONS, torch.device("cpu"))
    assert (row["height"], row["nodes"]) == ((2, 77) if k else (1, 61))
    memory = row["memory"]
    assert memory["peak"] is None and (memory["table_gradient"] == memory["table"] if k else memory["table_gradient"] == 0)
    assert memory["head_weights"] == (128 * 4 if k else 60 * 65 * 4) / 2**20
    assert 0 < row["milliseconds"]["min"] <= row["milliseconds"]["median"] <= row["milliseconds"]["max"]


def test_all_flat_heads_compute_the_same():
    """Kept logits or not: the opponent in the weaker form is the same model."""
    gradients = []
    for method in ("mdlm", "mdlm-wide"):
        model, act = cost.prepare_head(method, 60, 0, OPTIONS, torch.device("cpu"))
        act()
        gradients.append(model.backbone.leaf.grad.float())
    assert torch.allclose(*gradients, rtol=0.05, atol=1e-5) and float(gradients[0].abs().max()) > 1e-3


def test_attention_counts_its_work():
    row = cost.measure_attention("math", 16, OPTIONS, torch.device("cpu"))
    assert (row["batch"], row["heads"]) == (4, 1)
    work = row["tflops"]["forward"] * 1e12 * row["forward"]["milliseconds"]["median"] / 1000
    assert work == pytest.approx(2 * 2 * 4 * 16 * 16 * 64)


def test_growth_compares_with_the_smallest_vocabulary():
    def row(method: str, size: int, time: float, fill: float, memory: float | None) -> dict[str, Any]:
        return {"method": method, "vocabulary": size, "K": 4, "milliseconds": {"median": time}, "memory": {"head": memory},
                **({"table_fill": {"median": fill}} if fill else {})}

    rows = {"a": row("tied", 50, 2.5, 0.5, 10.0), "b": row("tied", 200, 4.0, 1.96, 10.5), "c": row("shared", 200, 9.0, 0, None),
            "d": {"failed": "out of memory"}, "e": row("shared", 50, 10.0, 0, None)}
    found = cost.growth(rows)
    assert found["tied, K=4, 200 tokens"] == pytest.approx({"time": 1.6, "time_without_table": 1.02, "memory": 1.05})
    assert found["shared, K=4, 200 tokens"] == {"time": 0.9, "time_without_table": 0.9, "memory": None} and len(found) == 2
