"""A server that cannot do what its flags say does not start, and says why in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--eviction", "vase", "--speculative-algorithm", "NGRAM"), "--speculative-algorithm"),
        (
            ("--eviction", "vase", "--eviction-budget", "4096", "--max-total-tokens", "1024"),
            "never evict in a KV pool of",
        ),
    ],
)
def test_refused_at_start(model: Path, flags: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    sentences = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line and words in line]
    assert len(sentences) == 1, (done.stdout + done.stderr)[-3000:]
