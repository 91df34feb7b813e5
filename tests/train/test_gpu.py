"""What only a GPU can show: compiled runs, the memory that was predicted, the CPU's noise."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tdlm.assemble import assemble
from tdlm.config import RunConfig
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.train.checkpoint import latest
from tdlm.train.loop import train
from tdlm.train.metrics import Quiet, read_metrics
from tdlm.train.plan import complete_tree, meta_model, predicted_memory
from tdlm.train.step import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compile", [False, True])
def test_a_run_on_the_gpu_follows_the_cpu(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                          compile: bool) -> None:
    for name in ("cpu", "cuda"):
        train(config, data=world["data"], tree=world["tree"], out=tmp_path / name, device=name, command="test",
              compile=compile and name == "cuda", progress=Quiet())
    cpu, gpu = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cpu", "cuda"))
    assert [record["bound"] for record in gpu] == pytest.approx([record["bound"] for record in cpu], rel=0.01)
    assert latest(tmp_path / "cuda") is not None


def test_a_gpu_run_continues_on_the_gpu(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda self, batches: 1 / 0 if self.done == 7 else real(self, batches))
        with pytest.raises(ZeroDivisionError):
            train(config, data=world["data"], tree=world["tree"], out=tmp_path, device="cuda", progress=Quiet())
    summary = train(config, data=world["data"], tree=world["tree"], out=tmp_path, device="cuda", progress=Quiet())
    assert summary["steps"] == 12 and [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")][-1] == 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_memory_is_what_a_step_takes(dtype: str) -> None:
    config = recipe("small")
    config = replace(config, train=replace(config.train, batch=16, dtype=dtype))
    tree = complete_tree(50_258, 512)
    predicted = predicted_memory(config, meta_model(config, tree), 16)["total"]
    assembly = assemble(config, tree, pad_id=0, device="cuda")
    trainer = Trainer(assembly.model, assembly.objective, config.train, torch.device("cuda"))
    tokens = torch.randint(1, 50_258, (16, 512), generator=torch.Generator().manual_seed(0))
    batch = type("Batch", (), {"tokens": tokens, "rows": torch.arange(16)})
    torch.cuda.empty_cache()
    for _ in range(3):
        trainer.update([batch])
    measured = torch.cuda.max_memory_allocated()
    print(f"{dtype}: predicted {predicted / 2**30:.2f} GiB, measured {measured / 2**30:.2f} GiB")
    assert predicted == pytest.approx(measured, rel=0.15)


def test_the_gpu_draws_the_cpus_noise() -> None:
    rows = torch.arange(8)
    for tag in ("time", "state"):
        cpu, gpu = Draws(1, 2, "train", rows, 8), Draws(1, 2, "train", rows.cuda(), 8)
        assert torch.equal(cpu.uniform(tag, 5), gpu.uniform(tag, 5).cpu())
        assert torch.equal(cpu.strata(tag), gpu.strata(tag).cpu())
