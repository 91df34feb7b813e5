"""The examples are part of the product: the plug-in trains from the command line, the teaching loop learns."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tdlm.process.oracle import Enumeration
from tdlm.registry import KINDS
from tests.proofs.test_bound import integrate, objective
from tests.worlds import TableModel, tiny_world

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_a_plugin_is_used_by_name_from_the_command_line():
    done = run("-m", "tdlm", "train", "tiny", "--dry-run", "--json", "--plugin", "plugin_parts",
               "--set", "method.head=parent-bias", "--set", "method.process=top-heavy", cwd=ROOT / "examples")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["config"]["method"]["head"]["kind"] == "parent-bias"
    assert plan["parameters"]["head"] == 512 * 512 + 512 + 513 * 512
    unknown = run("-m", "tdlm", "train", "tiny", "--dry-run", "--set", "method.head=parent-bias")
    assert unknown.returncode == 2 and "parent-bias" in unknown.stderr and "Traceback" not in unknown.stderr


def test_the_plugin_process_has_the_same_bound(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import plugin_parts

    tree, enumeration = tiny_world()
    model = TableModel(tree, enumeration.exact)
    got = integrate(objective(tree, plugin_parts.TopHeavy()), model, enumeration, (3, 1))
    assert float(got.sum()) == pytest.approx(-float(torch.log(enumeration.joint[3, 1])), abs=1e-9)
    assert isinstance(enumeration, Enumeration) and KINDS["top-heavy"] is plugin_parts.TopHeavy


def test_the_teaching_loop_learns():
    program = ("import sys; sys.path.insert(0, 'examples'); import teaching_loop as t; import torch;"
               "torch.set_num_threads(1); t.main(steps=100, batch=32)")
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    uniform = float(lines[0].split(" costs ")[1].split()[0])
    reached = float(next(line for line in lines if line.startswith("step")).split("bound ")[1].split()[0])
    assert reached < uniform - 0.1 and len(lines[-1]) == 64
