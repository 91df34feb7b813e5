"""SIGKILL at random moments of a save: there is always a whole checkpoint, never a half one under a final name."""
from __future__ import annotations

import subprocess
import sys

import pytest

# One interpreter imports torch once and forks a saver for every kill; the parent never starts torch's threads.
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tdlm.train import checkpoint

run, kills = Path(sys.argv[1]), int(sys.argv[2])
def parts(step):
    return {"model": {"w": torch.full((1 << 18,), float(step))},
            "optimizer": {"m": torch.full((1 << 19,), float(step))}}

def save_forever(step):
    while True:
        checkpoint.save(run, step, parts(step), {}, keep=2)
        step += 1

checkpoint.save(run, 0, parts(0), {}, keep=2)
chooser, interrupted, reached = random.Random(7), 0, 0
for _ in range(kills):
    first = checkpoint.newest(run, sys.exit).step + 1
    child = os.fork()
    if child == 0:
        save_forever(first)
    time.sleep(chooser.uniform(0.0, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    names = [path.name for path in (run / "checkpoints").iterdir()]
    interrupted += any(name.startswith(".") for name in names)
    found = checkpoint.checkpoints(run)
    assert found, "no checkpoint is left"
    for path in found:
        loaded = checkpoint.load(path)
        assert bool((loaded.tensors("model")["w"] == loaded.step).all()), path
    assert loaded.step >= reached, "a finished checkpoint was lost"
    reached = loaded.step
checkpoint.clean(run)
assert all(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())
print(interrupted, reached)
"""


def kill(folder: object, kills: int) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(kills)],
                          check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    interrupted, reached = map(int, done.stdout.split())
    return interrupted, reached


def test_thirty_kills(tmp_path) -> None:
    interrupted, reached = kill(tmp_path, 30)
    assert interrupted >= 5, f"only {interrupted} kills fell into a save; the test shows nothing"
    assert reached > 0


@pytest.mark.slow
def test_two_hundred_kills(tmp_path) -> None:
    interrupted, _ = kill(tmp_path, 200)
    assert interrupted >= 30
