"""Every Triton kernel under Triton's interpreter, in a process of its own: the choice is made at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_under_the_interpreter() -> None:
    folder = Path(__file__).parent / "interpreted"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
