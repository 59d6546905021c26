"""The portable CPU platform's arithmetic."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn.functional import linear
from sglang.srt.platforms import current_platform

torch.manual_seed(0)
weight, bias, x = torch.randn(512, 128), torch.randn(512), torch.randn(37, 128)
plain = linear(x, weight), linear(x, weight, bias)
current_platform.init_backend()
many = linear(x, weight), linear(x, weight, bias)
for rows in range(1, 37):
    assert torch.equal(linear(x[:rows], weight), many[0][:rows]), rows
    assert torch.equal(linear(x[:rows], weight, bias), many[1][:rows]), rows
    with torch.inference_mode():
        assert torch.equal(torch.matmul(x[:rows], weight.T), many[0][:rows]), rows
assert linear(x[:0], weight).shape == (0, 512)
for a, b in zip(plain, many):
    torch.testing.assert_close(a, b)
"""


def run(invariant: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "", "SGLANG_PLATFORM": "vase_cpu", "VASE_BATCH_INVARIANT": invariant}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_row_does_not_tell_its_batch() -> None:
    done = run("1")
    assert done.returncode == 0, done.stderr
    assert "AssertionError: 1" in run("0").stderr, "without the switch it does: the test can fail"
