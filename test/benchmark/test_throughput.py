"""The plumbing of the throughput benchmark, not the speed: real servers and client, rows, resumption, table, plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.common.machine import machine
from benchmark.serving import throughput
from benchmark.serving.variants import IDEAL, PRODUCTION


@pytest.mark.e2e
def test_a_quick_run_ends_in_tables_and_plots(tiny: Path, tmp_path: Path) -> None:
    command = ["--model", str(tiny), "--out", str(tmp_path), "--quick", "--policies", "vase-dkv"]
    command += ["--scenarios", "memory-bound-1/4", "--variants", "stock,vase-dkv"]
    assert throughput.main(command) == 0
    raw = (tmp_path / "rows.jsonl").read_text()
    rows = {row["variant"]: row for row in map(json.loads, raw.splitlines())}
    assert list(rows) == ["stock", "vase-dkv"]
    for row in rows.values():
        assert row["completed"] == row["requests"] == 4
        assert row["total_output_tokens"] == 4 * row["tokens_out"]
        assert row["output_throughput"] > 0 and row["peak_running"] >= 1 and row["versions"]["sglang"]
    assert rows["stock"]["evictions"] == 0 < rows["vase-dkv"]["evictions"]
    assert rows["vase-dkv"]["evicted_requests"] == 4
    # The pool holds one of them whole, two of them bounded.
    assert rows["vase-dkv"]["peak_running"] > rows["stock"]["peak_running"]
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} |" in table for name in rows) and (tmp_path / "throughput-pool.png").stat().st_size > 1000

    assert throughput.main(command) == 0, "a second call has nothing left to measure"
    assert (tmp_path / "rows.jsonl").read_text() == raw


def test_rows_of_another_model_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"model": "other", **machine()}) + "\n")
    with pytest.raises(SystemExit):
        throughput.main(["--model", "model", "--out", str(tmp_path)])
    assert "rows are of another model; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "vaze"], "got 'vaze'"),
        (["--budget", "64"], "--eviction-budget must be >= 65, got 64"),
        (["--repetitions", "0"], "argument --repetitions: a whole number above 0 is needed, got 0"),
        (["--scenarios", "equal-batch,poisson", "--variants", "eviction off"], "none of them belongs to poisson"),
        (["--out", __file__], "--out: "),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--model", "model", "--out", str(tmp_path), *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_variant_is_first_in_every_turn() -> None:
    variants = throughput.scenarios(False, ["vase-dkv", "vase"], 512, 4096, 8)["short-outputs"].variants
    names = [variant.name for variant in variants]
    orders = [[variant.name for variant in throughput.rotated(variants, turn)] for turn in range(len(names))]
    assert orders[0] == names and sorted(order[0] for order in orders) == sorted(names)
    assert all(sorted(order) == sorted(names) for order in orders)


@pytest.mark.parametrize("quick", [False, True])
def test_stock_has_the_flags_of_the_evicting_servers(quick: bool) -> None:
    """So it is the baseline with production flags and the one with matched flags."""
    assert PRODUCTION.flags == ()
    for scenario in throughput.scenarios(quick, ["vase-dkv", "vase"], 512, 4096, 8).values():
        base = scenario.variants[0]
        if scenario.name == "steady":  # stock with shorter prompts, as many tokens out
            assert base.name == IDEAL and base.client[-2] == str(scenario.tokens_out)
            base = replace(base, name=PRODUCTION.name, client=())
        assert base == PRODUCTION
        evicting = [variant for variant in scenario.variants if "--eviction" in variant.flags]
        assert evicting
        for variant in evicting:
            assert all(flag.startswith("--eviction") for flag in variant.flags[::2]), scenario.name
