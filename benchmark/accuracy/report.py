"""What ``benchmark.accuracy`` makes of its rows: standard errors, paired differences, tables, plots."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from scipy.stats import bootstrap

from benchmark.common.pages import pictures, rewrite
from benchmark.common.rows import Row, markdown_table, read

Key = tuple[str, str, str]
"""Variant, prefix mode, compression."""
FULL: Key = ("full", "-", "1")
CONTROL, OURS = "random", "vase-attnv"
RESAMPLES = 10_000
BEGIN = "<!-- generated: python -m benchmark.accuracy -->"
BEGIN_SUMMARY = "<!-- generated: python -m benchmark.accuracy, summary -->"

LOOP_NGRAM, LOOP_TIMES, LOOP_TOKENS = 64, 3, 128

_METHODS = ("full", "vase-attnv", "SeerAttention-R", "vase-dkv", "r-kv", "curdkv", "snapkv")
PUBLISHED: dict[str, dict[str, float]] = {
    "aime25": dict(zip(_METHODS, (66.41, 59.17, 58.59, 57.29, 49.58, 48.75, 47.92), strict=True)),
    "gpqa": dict(zip(_METHODS, (56.19, 47.98, 49.94, 43.94, 49.05, 37.94, 36.87), strict=True)) | {"random": 53.0},
    "math500": dict(zip(_METHODS, (93.93, 81.82, 84.67, 84.72, 83.28, 74.42, 72.30), strict=True)) | {"random": 87.4},
    "aime26": dict(zip(_METHODS, (62.71, 62.08, 60.42, 61.88, 54.58, 54.58, 53.33), strict=True)),
    "hmmt25": dict(zip(_METHODS, (45.94, 44.38, 40.42, 39.58, 36.98, 33.23, 35.31), strict=True)) | {"random": 43.8},
    "gsm8k": {
        **{"full": 88.0, "vase-attnv": 85.2, "vase-dkv": 87.6, "curdkv": 78.6, "snapkv": 64.3},
        **{"vase-attnv:reserve=0": 70.9, "random": 53.2, "evict-large-range": 14.3},
    },
}
"""Pass@1 in percent of Qwen3-4B with evictable prompts (arXiv 2606.03928). ``random`` is that of the re-test with
pinned prompts (arXiv 2609.03430), but for GSM8K."""
PUBLISHED_AT = ("4", "paper")
"""Compressions that they compare with."""


def loops(tokens: Sequence[int]) -> bool:
    """Whether an answer ends in a loop: its last 128 tokens or more are one n-gram, n <= 64, at least 3 times over."""
    for n in range(1, LOOP_NGRAM + 1):
        tail = tokens[-max(LOOP_TOKENS, LOOP_TIMES * n) :]
        if len(tail) >= max(LOOP_TOKENS, LOOP_TIMES * n) and tail[n:] == tail[:-n]:
            return True
    return False


def finest(rows: Sequence[Row]) -> str:
    """What differences are measured in: ``partial`` credit where answers have parts, else ``correct``."""
    return "partial" if all("partial" in row for row in rows) else "correct"


def by_problem(rows: Sequence[Row], field: str = "correct") -> dict[str, float]:
    """Mean of a ``field`` over the answers to each problem."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row["problem"]].append(row[field])
    return {problem: float(np.mean(values)) for problem, values in found.items()}


def pass_at_1(rows: Sequence[Row], field: str = "correct") -> tuple[float, float]:
    """Mean over problems of the share of right samples, and its standard error: a problem's samples are one cluster."""
    shares = list(by_problem(rows, field).values())
    error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return float(np.mean(shares)), error


def difference(rows: Sequence[Row], reference: Sequence[Row]) -> tuple[float, float, float] | None:
    """Pass@1 (of the ``finest`` field) minus the reference's, and its 95 % interval by a bootstrap over problems.

    Percentiles of 10,000 resamples with a fixed seed. ``None`` with fewer than two problems in common.
    """
    field = finest([*rows, *reference])
    ours, theirs = by_problem(rows, field), by_problem(reference, field)
    common = sorted(ours.keys() & theirs.keys())
    if len(common) < 2:
        return None
    pair = np.array([[ours[p], theirs[p]] for p in common]).T
    interval = bootstrap(
        tuple(pair),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(np.mean(pair[0] - pair[1])), float(interval.low), float(interval.high)


def grouped(rows: Sequence[Row]) -> dict[str, dict[Key, list[Row]]]:
    """Rows by task, then by ``Key``, the full cache first and in order of measurement otherwise."""
    found: dict[str, dict[Key, list[Row]]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["variant"] != FULL[0]):
        key = (row["variant"], row["prefix"], row["compression"])
        found[row["task"]].setdefault(key, []).append(row)
    return found


def _share(rows: Sequence[Row], name: str) -> str:
    return f"{100 * np.mean([row[name] for row in rows]):.0f}"


def _signed(found: tuple[float, float, float] | None) -> str:
    return "–" if found is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in found))


def _published(task: str, variant: str) -> str:
    return f"{PUBLISHED[task][variant]:.1f}" if variant in PUBLISHED[task] else "–"


def table(task: str, label: str, prefix: str, chosen: dict[Key, list[Row]]) -> list[str]:
    """One Markdown table: the variants of one compression and prefix mode, the full cache on top."""
    full = chosen[FULL]
    references = {f"against `{CONTROL}`, protect": (CONTROL, "protect", label)}
    if prefix != "protect":
        references[f"against `{CONTROL}`, {prefix}"] = (CONTROL, prefix, label)
    references[f"against `{OURS}`"] = (OURS, prefix, label)
    references = {title: key for title, key in references.items() if key in chosen}
    published = task in PUBLISHED and label in PUBLISHED_AT
    lines = []
    variants = {key: found for key, found in chosen.items() if key == FULL or key[1:] == (prefix, label)}
    field = finest(full)
    best_first = sorted(variants.items(), key=lambda pair: (pair[0] != FULL, -pass_at_1(pair[1], field)[0]))
    for key, found in best_first:
        cut = [row["kv_tokens"] for row in found if row["evictions"]]
        cells = {
            "": f"`{key[0]}`" if key != FULL else "full",
            "T": found[0]["budget"] or "–",
            "KV held": f"{np.mean(cut):.0f}" if cut else "–",
            "pass@1, %": _percent(found, "correct"),
            **({"published": _published(task, key[0])} if published else {}),
            **({"parts right, %": _percent(found, "partial")} if field == "partial" else {}),
            **{title: _signed(difference(found, chosen[r])) if r != key else "–" for title, r in references.items()},
            "against full": _signed(difference(found, full)) if key != FULL else "–",
            "tokens": f"{np.mean([row['tokens'] for row in found]):.0f}",
            "at limit, %": _share(found, "at_limit"),
            "loops, %": _share(found, "loop"),
            "evicted, %": f"{100 * np.mean([row['evictions'] > 0 for row in found]):.0f}",
        }
        lines.append(cells)
    text = markdown_table(lines)
    if published:
        measured = {key[0] for key in variants}
        others = [f"{name} {value:.1f}" for name, value in PUBLISHED[task].items() if name not in measured]
        text += ["", f"Published, not measured here: {', '.join(others)}."] if others else []
    return [*text, ""]


def tables(rows: Sequence[Row], runs: dict[str, Any]) -> str:
    """All tasks: what was run, then a table for each compression and prefix mode. ``runs``: settings by task."""
    lines = []
    for task, chosen in grouped(rows).items():
        if FULL not in chosen:
            continue
        run = runs[task]
        lines += [
            f"### {task}",
            "",
            f"Model: {run['model']}. Problems: {len(by_problem(chosen[FULL]))}, samples of each: {run['samples']}. "
            f"Temperature: {run['temperature']}, top-p: {run['top_p']}, output limit: {run['new_tokens']} tokens, "
            f"buffer: {run['buffer']} tokens, seed: {run['seed']}. With the full cache, prompt and answer together "
            f"have {mean_trace(chosen[FULL]):.0f} tokens on average, of which the prompt has "
            f"{np.mean([row['prompt_tokens'] for row in chosen[FULL]]):.0f}. Versions: {run['versions']}.",
            "",
        ]
        for label, prefix in dict.fromkeys((key[2], key[1]) for key in chosen if key != FULL):
            lines += [f"#### {_title(label)}, prefix {prefix}", "", *table(task, label, prefix, chosen)]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """A table a task: policies without options against compressions and prefix modes, best first in the first."""
    lines = []
    for task, chosen in grouped(rows).items():
        if FULL not in chosen:
            continue
        field = finest(chosen[FULL])
        columns = list(dict.fromkeys((prefix, label) for _, prefix, label in chosen if (prefix, label) != FULL[1:]))
        policies = dict.fromkeys(variant for variant, *_ in chosen if variant != FULL[0] and ":" not in variant)
        cells = {policy: [chosen.get((policy, *column), []) for column in columns] for policy in policies}
        best_first = sorted(cells, key=lambda policy: -pass_at_1(cells[policy][0], field)[0] if cells[policy][0] else 0)
        measure = "parts right" if field == "partial" else "pass@1"
        head = [f"{task}: {measure}, %", *(f"{_title(label)}, {prefix}" for prefix, label in columns)]
        found = [["full", *[_percent(chosen[FULL], field)] * len(columns)]]
        found += [[f"`{policy}`", *(_percent(some, field) for some in cells[policy])] for policy in best_first]
        found.append(["KV tokens held", *(_held(some) for some in zip(*cells.values(), strict=True))])
        lines += [*markdown_table([dict(zip(head, row, strict=True)) for row in found]), ""]
    return "\n".join(lines)


def _held(variants: Sequence[Sequence[Row]]) -> str:
    """Range over variants of the mean that an evicted request held."""
    cut = [[row["kv_tokens"] for row in rows if row["evictions"]] for rows in variants]
    means = [np.mean(tokens) for tokens in cut if tokens]
    return f"{min(means):.0f}–{max(means):.0f}" if means else "–"


def _percent(rows: Sequence[Row], field: str) -> str:
    return "{:.1f} ± {:.1f}".format(*(100 * value for value in pass_at_1(rows, field))) if rows else "–"


def _title(label: str) -> str:
    return f"{label}× compression" if label.replace(".", "").isdigit() else f"{label}'s budget"


def mean_trace(rows: Sequence[Row]) -> float:
    """Mean of prompt and generated tokens."""
    return float(np.mean([row["prompt_tokens"] + row["tokens"] for row in rows]))


def plots(rows: Sequence[Row], out: Path) -> list[str]:
    """Pass@1 against compression, a line a variant, a PNG a task measured at two compressions or more; their names."""
    names = []
    for task, chosen in grouped(rows).items():
        points: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
        for (variant, prefix, label), found in chosen.items():
            if (variant, prefix, label) != FULL and label.replace(".", "").isdigit():
                points[prefix, variant].append((float(label), *pass_at_1(found, finest(found))))
        lines = {key: sorted(values) for key, values in points.items() if len(values) > 1}
        if not lines or FULL not in chosen:
            continue
        prefixes = list(dict.fromkeys(prefix for prefix, _ in lines))
        figure, panels = plt.subplots(1, len(prefixes), figsize=(7 * len(prefixes), 5.5), sharey=True, squeeze=False)
        variants = sorted({variant for _, variant in lines})
        for panel, prefix in zip(panels[0], prefixes, strict=True):
            field = finest(chosen[FULL])
            panel.axhline(100 * pass_at_1(chosen[FULL], field)[0], color="black", linestyle=":", label="full")
            for index, variant in enumerate(variants):
                if (prefix, variant) not in lines:
                    continue
                x, y, error = np.array(lines[prefix, variant]).T
                # Shifted by up to 5 %, or error bars hide each other.
                shifted = x * 1.1 ** (index / max(1, len(variants) - 1) - 0.5)
                style = {"marker": "o", "markersize": 4, "capsize": 2, "color": plt.cm.tab20(index % 20)}
                panel.errorbar(shifted, 100 * y, 100 * error, label=variant, **style)
            ticks = sorted({value[0] for values in lines.values() for value in values})
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
            panel.set(
                title=f"{task}, prefix {prefix}",
                xlabel="compression of the mean trace",
                ylabel="parts of answers right, %" if field == "partial" else "pass@1, %",
            )
            panel.grid(alpha=0.3)
        panels[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        names.append(f"accuracy-{task}.png")
        figure.tight_layout()
        figure.savefig(out / names[-1], dpi=110)
        plt.close(figure)
    return names


def report(out: Path, docs: Path | None = None, brief: Path | None = None) -> Path:
    """Redraw tables and plots from ``rows.jsonl`` and ``runs.json`` alone; the file that holds them.

    ``docs`` and ``brief`` are Markdown files that get the tables with the plots, and the summary.
    """
    rows = read(out / "rows.jsonl")
    body, names = tables(rows, json.loads((out / "runs.json").read_text(encoding="utf-8"))), plots(rows, out)
    target = out / "table.md"
    target.write_text(body, encoding="utf-8")
    if docs is not None:
        rewrite(docs, BEGIN, body + pictures(docs, out, names))
        target = docs
    if brief is not None:
        rewrite(brief, BEGIN_SUMMARY, summary(rows))
    return target
