"""Whole policies on the kernels against the float64 oracle of the policies' own tests."""

from __future__ import annotations

import pytest

from test.sgl_vase.test_oracle import POLICIES, SHAPES, build, compare, select

CASES = [
    ("bf16-hnd16-g2-d80", name)
    for name in ("vase-attnv", "vase-dkv", "snapkv", "r-kv", "r-kv/own-spare", "random", "streaming", "keydiff", "h2o")
]
CASES += [("bf16-nhd1-g4-d128x64", name) for name in ("vase-dkv", "curdkv/rank-7", "vase-attnv/l2")]
CASES += [("fp8-hnd16-g2-d64", name) for name in ("vase-attnv", "vase-dkv", "r-kv/spare")]
CASES += [("flat", name) for name in ("vase-attnv", "vase-dkv")]
CASES += [("broken-bf16", name) for name in ("vase-attnv", "vase-dkv", "keydiff", "knorm")]
CASES += [("large-fp16", name) for name in ("vase-dkv", "value-range")]
CASES += [("lonely", name) for name in ("vase-attnv", "snapkv")]


@pytest.mark.parametrize("shape, name", CASES)
def test_kept_sets(monkeypatch, shape, name):
    monkeypatch.setenv("VASE_KERNELS", "triton")
    case = build(shape)
    tally = compare(select(POLICIES[name], case.round), POLICIES[name].oracle, case)
    assert tally.swapped <= (0 if SHAPES[shape].exact else 1) and tally.undecided <= 1, tally
