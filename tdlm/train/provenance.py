"""Where a number comes from: versions, commit, device. Never who or which host: results are published."""
from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("tdlm", "torch", "numpy", "safetensors", "tokenizers", "xxhash")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # running from a checkout that was never installed
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit of the package's own repository, `-dirty` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
                              capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def device_name(device: torch.device | str) -> str:
    """What the numbers were computed on, without naming the machine."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.machine()
    return platform.machine()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def provenance(device: torch.device | str, **more: Any) -> dict[str, Any]:
    """The facts every published number should stand beside."""
    return {"started": now(), "commit": commit(), "versions": versions(), "device": device_name(device), **more}
