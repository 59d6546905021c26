"""The offline build: the default shapes compile for each target without spills, and a spill is an error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sgl_vase_kernels import build

OPERATIONS = "projected_norms,compact,store_queries"


@pytest.mark.parametrize("target", build.TARGETS)
def test_default_shapes(tmp_path, target):
    out = tmp_path / "build.jsonl"
    command = [sys.executable, "-m", "sgl_vase_kernels.build", "--targets", target, "--operations", OPERATIONS]
    command += ["--dtypes", "bf16", "--dims", "128", "--out", str(out), "--markdown"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    kernels = {r["kernel"] for r in records}
    assert kernels == {"projected_norms_kernel", "compact_kernel", "store_queries_kernel"}
    for record in records:
        assert record["target"] == target and record["registers"] > 0
        assert not build.spills(record) and not build.too_big(record)
    assert all(f"`{kernel}`" in result.stdout for kernel in kernels)


def test_attention_and_selection_compile():
    for case in (
        build.Case(
            "window_attention_scores",
            options=(("group", "mean"), ("last", None), ("pool_width", 5), ("pooling", "avg")),
        ),
        build.Case("select", candidates=4096, options=(("race", True), ("reserve", True), ("sinks", False))),
    ):
        for record in build.build(case, "sm_90"):
            assert not build.spills(record), record


def test_every_operation_and_format_is_a_case():
    cases = list(build.cases(build.OPERATIONS, tuple(build.DTYPES), build.DIMS))
    assert {c.operation for c in cases} == set(build.OPERATIONS)
    for operation in set(build.OPERATIONS) - {"select"}:
        assert {(c.dtype, c.dim) for c in cases if c.operation == operation} == {
            (dtype, dim) for dtype in build.DTYPES for dim in build.DIMS
        }


def test_launches_do_not_depend_on_the_batch():
    """The launches of an operation, all layers, heads and rows: what docs/kernels.md states."""
    counts = {
        operation: len(build.launches(case, (9, 0)))
        for operation in build.OPERATIONS
        for case in [next(iter(build.cases((operation,), ("bf16",), (128,))))]
    }
    spared = next(c for c in build.cases(("cosine_redundancy",), ("bf16",), (128,)) if dict(c.options)["spare_newest"])
    assert len(build.launches(spared, (9, 0))) == 4
    assert counts == {
        "value_magnitude": 1,
        "projected_norms": 1,
        "window_attention_scores": 2,
        "cosine_redundancy": 3,
        "mean_direction_cosine": 2,
        "select": 1,
        "compact": 1,
        "store_queries": 1,
    }


@pytest.mark.parametrize("spill, code", [(0, 0), (8, 1)])
def test_a_spill_is_an_error(monkeypatch, capsys, spill, code):
    class Inline:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def submit(self, function, *args):
            class Done:
                def result(self):
                    return function(*args)

            return Done()

    def fake(case, target):
        zero = {"spill_load_bytes": 0, "registers": 1, "shared_bytes": 0, "options": {}}
        return [
            {
                **zero,
                "kernel": "k",
                "target": target,
                "dtype": "bf16",
                "dim": 1,
                "default": True,
                "spill_store_bytes": spill,
            }
        ]

    monkeypatch.setattr(build, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(build, "as_completed", lambda futures: futures)
    monkeypatch.setattr(build, "build", fake)
    arguments = ["--targets", "sm_90", "--operations", "store_queries", "--dtypes", "bf16", "--dims", "64"]
    assert build.main(arguments) == code
    assert ("spills on sm_90" in capsys.readouterr().err) == bool(spill)


@pytest.mark.parametrize("arguments", [["--targets", "hopper"], ["--dtypes", "int4"], ["--operations", "sort"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        build.main(arguments)
    assert stop.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_kernels_import_only_torch_and_triton():
    code = (
        "import sys; import torch, triton; before = set(sys.modules); import sgl_vase_kernels.triton_ops, "
        "sgl_vase_kernels.build, sgl_vase_kernels.torch_ops, sgl_vase_kernels.paging; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'sglang', 'sgl_vase', 'sgl_vase_srt', 'flashinfer', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_interpreter_flag_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(build.host, "interpreting", lambda: True)
    with pytest.raises(SystemExit) as stop:
        build.main(["--targets", "sm_90"])
    assert stop.value.code == 2 and "TRITON_INTERPRET" in capsys.readouterr().err
