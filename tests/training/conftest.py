"""Fixtures of the training tests."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture
def save_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save every checkpoint to disk, so that a kill can come after any of them."""
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 0.0)


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "tensorboard" else find(name))
