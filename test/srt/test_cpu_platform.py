"""The portable CPU platform's arithmetic."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn.functional import linear
from sglang.srt.platforms import current_platform

torch.manual_seed(0)
# The libraries choose code by all three sizes of a product.
shapes = (128, 512), (192, 180), (192, 1024), (512, 192), (576, 1536), (1536, 576)
cases = [(torch.randn(1000, k), torch.randn(n, k) / k**0.5, torch.randn(n)) for k, n in shapes]
plain = [(linear(x, weight), linear(x, weight, bias)) for x, weight, bias in cases]
current_platform.init_backend()
for (x, weight, bias), (product, sum) in zip(cases, plain):
    many = linear(x, weight), linear(x, weight, bias)
    for rows in (*range(1, 50), 63, 64, 65, 200, 208, 416, 999):
        some, case = x[1 : 1 + rows], (*weight.shape, rows)
        assert torch.equal(linear(some, weight), many[0][1 : 1 + rows]), case
        assert torch.equal(linear(some, weight, bias), many[1][1 : 1 + rows]), case
        with torch.inference_mode():
            assert torch.equal(torch.matmul(some, weight.T), many[0][1 : 1 + rows]), case
    assert linear(x[:0], weight).shape == (0, len(weight))
    torch.testing.assert_close(many, (product, sum))
"""


def run(invariant: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "", "SGLANG_PLATFORM": "vase_cpu", "VASE_BATCH_INVARIANT": invariant}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_row_does_not_tell_its_batch() -> None:
    done = run("1")
    assert done.returncode == 0, done.stderr
    assert "AssertionError: (" in run("0").stderr, "without the switch it does: the test can fail"
