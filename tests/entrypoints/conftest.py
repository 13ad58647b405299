"""Fixtures for tests of `LLM`: no options from outside, and the bundled model on the CPU engine."""

import os

import pytest

from cairn import LLM

SMALL = {"engine": "cpu", "kv_gb": 0.1, "threads": 1}


@pytest.fixture(autouse=True)
def no_options(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("CAIRN_", "XDG_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", config=None, **SMALL) as loaded:
        yield loaded
