"""Tables and plots of a throughput run, from its raw rows alone: ``python -m benchmark.throughput --redraw``."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmark.common.pages import pictures, rewrite
from benchmark.common.rows import Row, markdown_table, read
from benchmark.serving.variants import BASELINES, IDEAL, OFF

BEGIN = "<!-- generated: python -m benchmark.throughput -->"
BEGIN_SUMMARY = "<!-- generated: python -m benchmark.throughput, summary -->"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median, with the range when there are several values; a dash for none."""
    if not values:
        return "–"
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def output_rate(row: Row) -> float:
    return float(row["output_throughput"])


def decode_rate(row: Row) -> float:
    """Output tokens a second of a full batch without its prefill, for which only the first request of it waits."""
    return float(row["requests"] * 1000 / row["median_tpot_ms"])


RATIOS: dict[str, tuple[str, Callable[[Row], float]]] = {
    **{f"vs {base.name}": (base.name, output_rate) for base in BASELINES},
    "decode vs ideal": (IDEAL, decode_rate),
}
"""Column: the variant that the others are divided by, and the rate."""


def ratios(rows: list[Row], base: list[Row], rate: Callable[[Row], float]) -> list[float]:
    """Turn by turn: each repetition against the same of the base, if one call measured both: hours differ."""

    def turn(row: Row) -> tuple[Any, ...]:
        return row.get("call"), row["repetition"]

    of_base = {turn(row): rate(row) for row in base}
    return [rate(row) / of_base[turn(row)] for row in rows if turn(row) in of_base]


COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "out, a request": lambda rows: f"{statistics.median(r['total_output_tokens'] / r['requests'] for r in rows):.0f}",
    "output tok/s": lambda rows: spread([row["output_throughput"] for row in rows]),
    "TTFT ms": lambda rows: spread([row["median_ttft_ms"] for row in rows], 0),
    "TTFT p99 ms": lambda rows: spread([row["p99_ttft_ms"] for row in rows], 0),
    "TPOT ms": lambda rows: spread([row["median_tpot_ms"] for row in rows]),
    "TPOT p99 ms": lambda rows: spread([row["p99_tpot_ms"] for row in rows]),
    "ITL p99 ms": lambda rows: spread([row["p99_itl_ms"] for row in rows]),
    "running, mean (peak)": lambda rows: (
        f"{statistics.median(r['mean_running'] for r in rows):.1f} ({max(r['peak_running'] for r in rows):.0f})"
    ),
    "peak KV tokens": lambda rows: f"{max(row['peak_kv_tokens'] for row in rows):.0f}",
    "evictions": lambda rows: f"{statistics.median(row['evictions'] for row in rows):.0f}",
    "evicted tokens": lambda rows: f"{statistics.median(row['evicted_tokens'] for row in rows):.0f}",
    "evicted requests": lambda rows: (
        f"{statistics.median(row['evicted_requests'] / row['requests'] for row in rows):.0%}"
    ),
    "in rounds, s": lambda rows: spread([row["eviction_seconds"] for row in rows], 2),
    "planning, s": lambda rows: spread([row["planning_seconds"] for row in rows], 2),
    "cached tokens (of the prompts')": lambda rows: (
        f"{statistics.median(row['cached_tokens'] for row in rows):.0f}"
        f" ({statistics.median(row['cached_tokens'] / row['prompt_tokens'] for row in rows):.0%})"
    ),
    "retractions": lambda rows: f"{max(row['retractions'] for row in rows):.0f}",
    "peak RSS GiB": lambda rows: f"{max(row['peak_rss_mib'] for row in rows) / 1024:.1f}",
    "peak GPU GiB": lambda rows: f"{most / 1024:.1f}" if (most := max(row["peak_gpu_mib"] for row in rows)) else "–",
}
PUBLISHED = {
    "stock": "132.9 (68.7)",
    **{"r-kv T 2048": "358.6 (34.3)", "vase T 2048": "384.1 (34.3)", "vase-dkv T 2048": "410.9 (33.9)"},
    **{"r-kv T 4096": "277.8 (42.4)", "vase T 4096": "333.4 (39.6)", "vase-dkv T 4096": "364.8 (38.9)"},
}
"""Output tok/s (peak GiB) of arXiv 2606.03928: its own HF code, Qwen3-14B, batch 16, 16k out, one 80 GB GPU."""


def _cell(column: Callable[[list[Row]], str], rows: list[Row]) -> str:
    """The cell of the rows that have the value: a dash if none has, as rows of an older benchmark lack some."""
    known = []
    for row in rows:
        with contextlib.suppress(KeyError):
            column([row])
            known.append(row)
    return column(known) if known else "–"


def size(row: Row) -> str:
    return f"{row['requests']} x {row['tokens_out']} out, budget {row['budget']}"


def grouped(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by scenario and variant, first what others are divided by; a scenario run at several sizes is several."""
    sizes: dict[str, set[str]] = {}
    for row in rows:
        sizes.setdefault(row["scenario"], set()).add(size(row))
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name = row["scenario"]
        if len(sizes[name]) > 1:
            name += f", {size(row)}"
        found.setdefault(name, {}).setdefault(row["variant"], []).append(row)
    divisors = [base for base, _ in RATIOS.values()]
    return {
        name: dict(sorted(variants.items(), key=lambda named: named[0] not in divisors))
        for name, variants in found.items()
    }


def table(rows: list[Row]) -> str:
    """Markdown, one table a scenario."""
    lines = []
    groups = grouped(rows)
    for scenario, variants in groups.items():
        some = next(iter(variants.values()))[0]
        days = sorted({row["date"] for measured in variants.values() for row in measured})
        budget = "" if scenario.startswith("paper") else f" The budget is {some['budget']} tokens."
        lines += [
            f"### {scenario}",
            "",
            f"{some['requests']} request{'s' if some['requests'] > 1 else ''} to the model {some['model']}, "
            f"{'at most ' if scenario.startswith('poisson') else ''}{some['tokens_in']} prompt tokens and "
            f"{some['tokens_out']} output tokens each. The KV pool has {some['pool_tokens']:,.0f} tokens.{budget} "
            f"Measured on {', '.join(days)} with sglang {some['versions']['sglang']} and torch "
            f"{some['versions']['torch']} ({some['machine']}).",
            "",
        ]
        columns = {"": list(variants)}
        for name, (base, rate) in RATIOS.items():
            of_base = variants.get(base, [])
            columns[name] = [spread(ratios(measured, of_base, rate), 2) for measured in variants.values()]
        for name, column in COLUMNS.items():
            columns[name] = [_cell(column, measured) for measured in variants.values()]
        if scenario == "paper-16k":
            columns["published tok/s (GiB)"] = [PUBLISHED.get(variant, "–") for variant in variants]
        columns = {name: cells for name, cells in columns.items() if {*cells} != {"–"}}
        rows_of_cells = zip(*columns.values(), strict=True)
        lines += [*markdown_table([dict(zip(columns, cells, strict=True)) for cells in rows_of_cells]), ""]
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Markdown, one line a scenario and size: the speed of the evicting variants as a ratio, and peak KV tokens."""
    groups = [variants for _, variants in sorted(grouped(rows).items())]
    divisors = [base for base, _ in RATIOS.values()]
    shown = dict.fromkeys(name for variants in groups for name in variants if name not in (*divisors, OFF.name))
    head = ["scenario", "size", "turns", "compared with", *(f"speed, `{name}`" for name in shown)]
    head += [f"peak KV tokens, {name}" for name in ("full cache", *(f"`{name}`" for name in shown))]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variants in groups:
        base, rate = next(found for found in RATIOS.values() if found[0] in variants)
        found = {name: ratios(variants.get(name, []), variants[base], rate) for name in shown}
        some = variants[base][0]
        cells = [some["scenario"], size(some), str(max(map(len, found.values()), default=0)), base]
        cells += [spread(values, 2) for values in found.values()]
        cells += [_cell(COLUMNS["peak KV tokens"], variants.get(name, [])) for name in (base, *shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _save(name: str, out: Path, title: str, x: str, y: str) -> None:
    plt.title(title)
    plt.xlabel(x)
    plt.ylabel(y)
    plt.grid(alpha=0.3)
    plt.legend()
    plt.tight_layout()
    plt.savefig(out / name, dpi=120)
    plt.close()


def plots(rows: list[Row], out: Path) -> list[str]:
    """PNG files: throughput against the pool, concurrency and KV tokens over time. Their names."""
    names = []
    groups = grouped(rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for group in groups.values():
        for variant, measured in group.items():
            if measured[0]["scenario"].startswith("memory-bound"):
                rate = statistics.median(row["output_throughput"] for row in measured)
                lines.setdefault(f"{variant}, {size(measured[0])}", []).append((measured[0]["pool_tokens"], rate))
    swept = {label: points for label, points in lines.items() if len(points) > 1}
    for label, points in (swept or lines).items():
        plt.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    if lines:
        plt.xscale("log", base=2)
        names.append("throughput-pool.png")
        _save(names[-1], out, "Throughput against the KV pool", "pool, tokens", "output tokens / s")
    for file, column, scenario, label in (
        ("concurrency.png", 1, "memory-bound-1/4", "running requests"),
        ("kv-tokens.png", 2, "one-request", "KV tokens in use"),
    ):
        shown = [(name, group) for name, group in groups.items() if name.split(",")[0] == scenario]
        if not shown:
            continue
        name, group = max(shown, key=lambda found: max(rows[0]["tokens_out"] for rows in found[1].values()))
        for variant, measured in group.items():
            samples = measured[0]["samples"]
            plt.plot([s[0] for s in samples], [s[column] for s in samples], label=variant)
        names.append(file)
        _save(file, out, name, "seconds", label)
    return names


def report(out: Path, docs: Path | None = None, brief: Path | None = None) -> Path:
    """Redraw tables and plots from ``rows.jsonl`` alone; the file that holds the tables.

    ``docs`` and ``brief`` are Markdown files that get the tables with the plots, and the summary.
    """
    rows = read(out / "rows.jsonl")
    body, names = table(rows), plots(rows, out)
    target = out / "table.md"
    target.write_text(body)
    if docs is not None:
        rewrite(docs, BEGIN, f"{body}\n{pictures(docs, out, names)}")
        target = docs
    if brief is not None:
        rewrite(brief, BEGIN_SUMMARY, summary(rows))
    return target
