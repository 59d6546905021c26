"""The short soak: two server mixes, one of them with forced retraction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import soak

pytestmark = pytest.mark.e2e


def test_soak(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = soak.main(["--model", str(model), "--requests", "70", "--seed", "3", "--mixes", "2", "--sample", "3"])
    said = capsys.readouterr().out.splitlines()
    summary = json.loads(said[-1])
    assert status == 0 and summary["violations"] == 0, said
    assert summary["evicted"] > 10 and summary["retracted"] > 0 and summary["compared"] >= 3, summary
