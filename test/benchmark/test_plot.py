"""Throughput tables from raw rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.serving import plot, throughput
from benchmark.serving.variants import BASELINES, IDEAL, OFF


def row(scenario: str, variant: str, budget: int, out: int, rate: float, repetition: int = 0) -> dict[str, Any]:
    return {
        **{"scenario": scenario, "variant": variant, "budget": budget, "tokens_out": out, "repetition": repetition},
        **{"requests": 8, "tokens_in": 128, "pool_tokens": 1024, "machine": "m", "date": "d", "model": "n"},
        **{"versions": {"sglang": "s", "torch": "t"}, "output_throughput": rate, "median_tpot_ms": 8000 / rate},
    }


ROWS = [
    *(row("equal-batch", "stock", 256, 2048, rate, i) for i, rate in enumerate((10.0, 20.0))),
    *(row("equal-batch", "vase", 256, 2048, rate, i) for i, rate in enumerate((30.0, 40.0))),
    row("equal-batch", "vase", 512, 4096, 45.0),
]


def test_a_scenario_at_two_sizes_is_two_tables() -> None:
    assert list(plot.grouped(ROWS)) == [
        "equal-batch, 8 x 2048 out, budget 256",
        "equal-batch, 8 x 4096 out, budget 512",
    ]
    assert list(plot.grouped(ROWS[:4])) == ["equal-batch"]


def test_ratios_are_formed_turn_by_turn() -> None:
    first, second = plot.table(ROWS).split("###")[1:]
    assert "| vase | 2.50 (2.00–3.00) | 35.0 (30.0–40.0) |" in first, "3 and 2 times, not 35 / 15"
    assert "decode vs ideal" not in first, "a column of dashes is none"
    assert "| vase | 45.0 |" in second


def test_decode_is_compared_with_the_ideal_without_the_prefill() -> None:
    best = [row("steady", IDEAL, 512, 256, rate, i) for i, rate in enumerate((50.0, 80.0))]
    kept = [row("steady", "vase", 512, 256, rate, i) for i, rate in enumerate((45.0, 64.0))]
    for some in kept:
        some["output_throughput"] = 1.0
    table = plot.table([*kept, *best])
    assert "| vase | 0.85 (0.80–0.90) | 1.0" in table and "|  | decode vs ideal | output tok/s |" in table
    other = plot.table([*kept, *({**some, "budget": 256} for some in best)]).split("###")
    assert "| vase | 1.0" in other[1] and "decode vs ideal" not in other[1], "no ideal of that budget was measured"
    assert table.index("| ideal | 1.00 (1.00–1.00) |") < table.index("| vase |")


def test_both_baselines_have_a_column_and_the_first_rows() -> None:
    rates = {"vase": 20.0, **{base.name: rate for base, rate in zip(BASELINES, (10.0, 8.0), strict=True)}}
    lines = plot.table([row("poisson", name, 256, 2048, rate) for name, rate in rates.items()]).splitlines()
    assert [line.split(" | ")[0] for line in lines[-3:]] == [
        "| stock",
        "| stock without radix cache and overlap",
        "| vase",
    ]
    assert "| vase | 2.00 | 2.50 | 20.0 |" in lines[-1]


def test_a_cell_is_of_the_rows_that_counted_it() -> None:
    rows = [row("poisson", "vase", 256, 2048, 10.0, i) for i in range(2)]
    assert "retractions" not in plot.table(rows)
    rows[1]["retractions"] = 3
    assert "| 3 |" in plot.table(rows)


def test_a_folder_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        throughput.main(["--model", "any", "--out", str(tmp_path), "--redraw"])
    assert f"--out {tmp_path}: no rows.jsonl there" in capsys.readouterr().err


def test_the_summary_has_a_line_a_scenario_and_size() -> None:
    best = row("steady", IDEAL, 512, 64, 10.0)
    some = [best, *ROWS, row("equal-batch", OFF.name, 256, 2048, 11.0), row("equal-batch", "stock", 512, 4096, 9.0)]
    held = [{**one, "peak_kv_tokens": 300 + (one is best)} for one in some]
    first, _, *lines = plot.summary(held).splitlines()
    assert first == (
        "| scenario | size | turns | compared with | speed, `vase` | peak KV tokens, full cache "
        "| peak KV tokens, `vase` |"
    )
    assert lines == [
        "| equal-batch | 8 x 2048 out, budget 256 | 2 | stock | 2.50 (2.00–3.00) | 300 | 300 |",
        "| equal-batch | 8 x 4096 out, budget 512 | 1 | stock | 5.00 | 300 | 300 |",
        "| steady | 8 x 64 out, budget 512 | 0 | ideal | – | 301 | – |",
    ]


def test_no_ratio_across_calls() -> None:
    """Another call is another hour, and the machine may be faster then."""
    rows = [{**some, "call": "second" if some["repetition"] else "first"} for some in ROWS[:4]]
    assert "| vase | 2.50 (2.00–3.00) |" in plot.table(rows)
    rows[3]["call"] = "third"
    assert "| vase | 3.00 |" in plot.table(rows)
    rows[2]["call"] = "third"
    assert "| vase | – |" in plot.table(rows)
