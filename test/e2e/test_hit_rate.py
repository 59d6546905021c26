"""Radix-cache hits of serving with eviction against stock SGLang's, and the tree-of-thought example of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmark.serving.hit_rate import measure, violations, workloads
from benchmark.serving.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

Serve = Callable[..., Server]
BUDGET = 256
EVICTING = ("--eviction", "vase-dkv", "--eviction-budget", str(BUDGET))
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tree_of_thought.py"
WORKLOADS = workloads(BUDGET, quick=True)
# The branches of a program run at once: on a busy machine which of them comes first, and is hit, is chance.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name.startswith("tree") else ()) for name in WORKLOADS]


@pytest.mark.parametrize("name", NAMES)
def test_hits_are_those_of_stock(serve_tiny: Serve, tiny: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    stock = measure(serve_tiny(SGLANG_PLUGINS="vase_cpu"), WORKLOADS[name], tokenizer)
    row = measure(serve_tiny(*EVICTING), WORKLOADS[name], tokenizer)
    assert violations(stock, stock) == []
    assert violations(row, stock) == []
    # An evicted answer that is sent again is all that the tree lacks.
    assert (row["cached_tokens"] == row["stock_rule"]) == WORKLOADS[name].equal
    if not name.startswith("tree"):
        assert row["prompt_tokens"] == stock["prompt_tokens"]
    fewer = {key: row[key] - 1 for key in ("cached_tokens", "counted_cached_tokens")}
    assert bool(violations({**row, **fewer}, stock)) == WORKLOADS[name].equal, "the comparison cannot fail"


def test_tree_of_thought_example(serve_tiny: Serve) -> None:
    """Every branch evicts, and one of them is chosen and answered from."""
    command = [sys.executable, str(EXAMPLE), "--url", serve_tiny(*EVICTING).url, "--tokens", str(BUDGET * 5 // 4)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    branches, answer = done.stdout.split("\n\n", 1)
    held = re.findall(r"^(.+): held (\d+) KV tokens, (\d+) evictions; yes - no [+-]", branches, re.M)
    assert len(held) == len(branches.splitlines()) == 3
    assert all(int(evictions) > 0 for _, _, evictions in held), branches
    best, text = answer.split(": ", 1)
    assert best in [name for name, _, _ in held] and text.strip()
