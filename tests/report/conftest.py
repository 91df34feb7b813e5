"""Fake runs for the report's tests, made once."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("fake_run", Path(__file__).with_name("fake_run.py"))
assert _spec is not None and _spec.loader is not None
fake_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_run)


@pytest.fixture(scope="session")
def make_run():
    return fake_run.write_fake_run


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    return fake_run.write_fake_run(tmp_path_factory.mktemp("runs") / "demo", steps=120)
