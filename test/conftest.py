"""Test processes run side by side (pytest-xdist): each gets its share of the cores, and so do its servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct; ``VASE_TEST_MODEL`` names a built copy to reuse."""
    if directory := os.environ.get("VASE_TEST_MODEL"):
        return Path(directory)
    from benchmark.demo.model import build

    directory = tmp_path_factory.mktemp("model") / "smollm2"
    build(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that decodes fast, for tests that do not look at what is said."""
    from test.e2e import tiny_model

    directory = tmp_path_factory.mktemp("tiny")
    tiny_model.build(directory, model)
    return directory
