"""Small worlds for the proofs: random trees of at most eight leaves, joint distributions, and two models without weights."""
from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if os.environ.get("TDLM_SHAPES", "1") == "1":  # shapes in signatures are checked in tests, and only here
    install_import_hook(["tdlm.process", "tdlm.model", "tdlm.objectives", "tdlm.sample"], "beartype.beartype")

# a busy machine draws slowly: that is no failure
settings.register_profile("tdlm", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tdlm")


@pytest.fixture(autouse=True)
def one_thread():
    """Two workers on two cores: more threads only wait for one another."""
    torch.set_num_threads(1)
