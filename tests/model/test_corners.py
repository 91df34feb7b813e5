"""What replayed passes, kernels that read raw memory, and threads beside a GPU must not get wrong."""
from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tdlm.data.batches import Batch, Prefetch
from tdlm.model.kernels import passes, rows
from tdlm.model.kernels.recording import WARM, Recording
from tdlm.train.optimizer import clip_gradients
from tests.model.test_recording import Rehearsed, ask, backbone, gradients


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    from tdlm.model.kernels import rows_triton

    monkeypatch.setattr(rows, "fast", lambda x: rows_triton)
    return rows_triton


def test_gather_of_an_index_that_is_a_view(kernels: Any) -> None:
    table, index = torch.randn(30, 20), torch.randint(0, 30, (7, 9))
    for view in (index[:, :5], index.T, index[:, ::2], index[:1].expand(4, -1)):
        assert torch.equal(rows.gather(table, view, torch.float32), table[view])


@pytest.mark.parametrize(("conditioning", "count"), [("none", 3), ("none", 1), ("level", 1), ("time", 1)])
def test_micro_batches_add_up(conditioning: str, count: int) -> None:
    recording = Rehearsed(copies=True)
    models = backbone(conditioning, recording), backbone(conditioning, None)
    for step in range(WARM + 2):
        for model in models:
            model.zero_grad(set_to_none=True)
            for micro in range(3):
                ask(model, count, 10 * step + micro).backward()
        ours, theirs = map(gradients, models)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], msg=f"step {step}, {name}")


def test_two_passes_of_a_trainer_that_expects_one() -> None:
    recording = Rehearsed(copies=False)
    models = backbone("level", recording), backbone("level", None)
    for step in range(WARM + 1):
        models[0].zero_grad(set_to_none=True)
        ask(models[0], 3, step).backward()
    assert recording.there is not None
    for model in models:
        model.zero_grad(set_to_none=True)
        ask(model, 3, 100).backward()
        ask(model, 3, 101).backward()
    torch.testing.assert_close(gradients(models[0]), gradients(models[1]))


def test_a_final_norm_that_moves() -> None:
    recording = Rehearsed()
    model = backbone("time", recording)
    for step in range(WARM + 1):
        model.zero_grad(set_to_none=True)
        ask(model, 2, step).backward()
    assert recording.there is not None
    model.zero_grad(set_to_none=True)
    seen: list[int] = []
    recording.forward = lambda *a: seen.append(1) or Recording.forward(recording, *a)  # type: ignore[method-assign]
    model.final_norm.weight.data = model.final_norm.weight.data * 1.5
    ask(model, 2, 60)
    assert not seen, "replayed with the final norm that was"


def test_narrow_weights_follow_a_fused_optimizer() -> None:
    model = backbone("level", None)
    nodes, level = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def quiet() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(nodes, torch.zeros(1), level)

    model(nodes, torch.zeros(1), level).sum().backward()
    quiet()
    optimizer.step()
    ours = quiet()
    model.kept.clear()
    assert torch.equal(ours, quiet())


def test_a_limit_that_is_gone() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    parameter.grad = torch.full((4,), 10.0)
    clip_gradients(optimizer, 1.0)
    parameter.grad = torch.full((4,), 10.0)
    clip_gradients(optimizer, None)
    optimizer.step()
    assert float(parameter.detach()[0]) == -10


def test_threads_of_later_threads() -> None:
    class Rows:
        def batch(self, *of: int) -> Batch:
            return Batch(torch.zeros(1, 1), torch.zeros(1))

    torch.set_num_threads(2)
    with Prefetch(Rows(), range(2), 0, 1, 1, 4, False, lambda batch, step: None) as ahead:  # type: ignore[arg-type]
        list(ahead)
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert counts == [2]


@pytest.mark.parametrize("fault", ["no compiler", None])
def test_triton_that_makes_no_kernels_is_done_without(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed is not usable: a machine without a C compiler, a GPU too old."""
    from types import SimpleNamespace

    def bend(x: Tensor) -> Tensor:
        if fault is not None:
            raise RuntimeError(fault)
        return x

    monkeypatch.setattr(passes.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tdlm.model.kernels.passes_triton", SimpleNamespace(bend=bend))  # type: ignore[arg-type]
    monkeypatch.setattr("tdlm.model.kernels.passes_triton", sys.modules["tdlm.model.kernels.passes_triton"], raising=False)
    monkeypatch.setattr(passes.torch, "zeros", lambda *of, device: None)
    if fault is None:
        assert passes.usable.__wrapped__()
    else:
        with pytest.warns(UserWarning, match="no kernels here.*no compiler"):
            assert not passes.usable.__wrapped__()
