"""Real processes and real signals: a run that is killed anywhere ends as if nothing had happened."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# One interpreter imports torch once; every sitting of a run is a fork of it. Torch has one thread everywhere, so the
# reference and the killed run do the same sums in the same order.
SCRIPT = """
import importlib.util, json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("world", sys.argv[2])
world = importlib.util.module_from_spec(spec)
spec.loader.exec_module(world)
from tdlm.train.loop import train
from tdlm.train.metrics import Progress, Quiet

root, task = Path(sys.argv[1]), sys.argv[3]
places = world.make_world(root)
settings = world.replace(world.CONFIG.train, steps=60, save_every=7, valid_every=25, ema=0.99)
config = world.replace(world.CONFIG, train=settings)

def sitting(out, progress):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(config, **places, out=root / out, device="cpu", command="tdlm train tiny --out X",
                  progress=progress())
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child

def lines(out):
    path = root / out / "metrics.jsonl"
    return path.read_bytes().count(b"\\n") if path.exists() else 0

def finish(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert finish(sitting("whole", Quiet)) == 0
if task == "kill":
    chooser, kills, code = random.Random(3), 0, None
    while code != 0:
        child, seen = sitting("stopped", Quiet), lines("stopped")
        deadline = time.time() + 20
        while lines("stopped") <= seen and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            assert time.time() < deadline
            time.sleep(0.001)
        if kills < 6:
            time.sleep(chooser.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            kills += 1
        code = finish(child)
    print(json.dumps({"kills": kills}))
else:
    codes = []
    for number in (signal.SIGTERM, signal.SIGINT):
        child, seen = sitting("stopped", lambda: Progress(sys.stderr)), lines("stopped")
        while lines("stopped") < seen + 2:
            time.sleep(0.001)
        os.kill(child, number)
        codes.append(finish(child))
    codes.append(finish(sitting("stopped", Quiet)))
    print(json.dumps({"codes": codes}))
"""
TIMES = ("seconds", "tokens_per_second", "memory")


def play(folder: Path, task: str) -> tuple[dict, str]:
    world = Path(__file__).parents[1] / "train" / "conftest.py"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), str(world), task],
                          check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def curve(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def assert_same(folder: Path) -> None:
    assert curve(folder / "stopped") == curve(folder / "whole")
    for name in ("model", "optimizer", "ema"):
        file = Path("checkpoints", "step-00000060", f"{name}.safetensors")
        assert (folder / "stopped" / file).read_bytes() == (folder / "whole" / file).read_bytes(), name
    assert len(curve(folder / "whole")) == 21 + 3  # the first step and every third; two validations and the last


def test_a_run_killed_again_and_again_equals_one_that_was_not(tmp_path: Path) -> None:
    result, _ = play(tmp_path, "kill")
    assert result["kills"] >= 3  # six are tried; on a busy machine the run may be over before the last ones
    assert_same(tmp_path)


def test_sigterm_and_ctrl_c_save_and_say_how_to_go_on(tmp_path: Path) -> None:
    result, spoken = play(tmp_path, "signals")
    assert result["codes"] == [130, 130, 0]
    assert spoken.count("everything is saved, continue with: tdlm train tiny --out X") == 2
    assert "continuing" in spoken
    assert_same(tmp_path)
