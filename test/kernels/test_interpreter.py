"""The suite in ``interpreted/``: every kernel on CPU tensors, in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_interpreted(path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("VASE_KERNELS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
