"""Time of every kernel of an eviction round, against the bytes that it must move: ``python -m benchmark.kernels``.

Needs a CUDA device, torch and triton, nothing else. For each kernel: bytes it cannot avoid, median time, share of the
copy bandwidth measured in the same run, and share of the time of one decode step's attention reads over the same cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from sgl_vase_kernels import KVPool, QueryWindow, Rows, triton_ops

BUFFER = 64
FP32 = 4


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    q_heads: int
    kv_heads: int
    dim: int


MODELS = {m.name: m for m in (Model("Qwen3-4B", 36, 32, 8, 128), Model("Qwen3-14B", 40, 40, 8, 128))}


@dataclass(frozen=True)
class Result:
    model: str
    budget: int
    due: int
    kernel: str
    bytes: int
    seconds: float
    copy_share: float
    attention_share: float


def floors(model: Model, budget: int, due: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes that each kernel, and each whole round, cannot avoid: inputs once, outputs once.

    A round's floor is one read of what it scores, plus the moves; numbers passed between kernels do not count.
    """
    vectors = model.layers * model.kv_heads * due * budget
    side, score = vectors * model.dim * itemsize, vectors * FP32
    lines = model.layers * model.kv_heads * due
    survivors = lines * (budget - BUFFER)
    queries = model.layers * model.q_heads * due * BUFFER * model.dim * itemsize
    # At most BUFFER survivors behind the cut and the buffer itself: read and written, keys and values.
    moves = lines * 2 * BUFFER * 2 * 2 * model.dim * itemsize
    # In order, all behind the first hole moves, which is near the start of any long row.
    ordered = lines * budget * 2 * 2 * model.dim * itemsize
    return {
        "value_magnitude": side + score,
        "projected_norms": 2 * side + score,
        "window_attention_scores": side + queries + score,
        "select": score + 8 * survivors,
        "select (race, reserve)": 2 * score + 8 * survivors,
        "compact": moves,
        "compact (order kept)": ordered,
        "round: vase-dkv": 2 * side + moves,
        "round: vase-attnv": 2 * side + queries + ordered,
    }


def _seconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")) / 1000


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written both counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def measure(model: Model, budget: int, due: int, bandwidth: float) -> Iterator[Result]:
    length = budget + BUFFER
    slots = due * length
    shape = (slots, model.kv_heads, model.dim)
    k, v = ([torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(model.layers)] for _ in range(2))
    pool = KVPool.from_slots(k, v)
    each = {"first": 0, "keep": budget - BUFFER, "reserve": budget // 4, "sinks": 4, "round": 0, "carried": 0}
    fields = {name: (value,) * due for name, value in each.items()}
    where = torch.randperm(slots, device="cuda")
    rows = Rows(where, (length,) * due, BUFFER, seed=tuple(range(due)), **fields)
    ring = torch.randn(model.layers, due, BUFFER, model.q_heads, model.dim, dtype=torch.bfloat16, device="cuda")
    queries = QueryWindow(ring, tuple(range(due)), (length,) * due, (BUFFER,) * due, model.dim**-0.5)

    def attention() -> torch.Tensor:
        return triton_ops.window_attention_scores(
            pool, rows, queries, pool_width=5, pooling="avg", group="mean", last=None
        )

    def select(score: torch.Tensor, reserve: torch.Tensor | None) -> torch.Tensor:
        race = reserve is not None
        return triton_ops.select(pool, rows, score, race=race, sinks=not race, reserve_score=reserve, sinks_lead=True)

    def dkv() -> None:
        kept = select(triton_ops.projected_norms(pool, rows, 20, fixed_round=False), None)
        triton_ops.compact(pool, rows, kept, keep_order=False)

    def attnv() -> None:
        kept = select(attention(), triton_ops.value_magnitude(pool, rows, "range"))
        triton_ops.compact(pool, rows, kept, keep_order=True)

    magnitude, norms = triton_ops.value_magnitude(pool, rows, "range"), attention()
    kept = select(norms, magnitude)
    calls: dict[str, Callable[[], object]] = {
        "value_magnitude": lambda: triton_ops.value_magnitude(pool, rows, "range"),
        "projected_norms": lambda: triton_ops.projected_norms(pool, rows, 20, fixed_round=False),
        "window_attention_scores": attention,
        "select": lambda: select(norms, None),
        "select (race, reserve)": lambda: select(norms, magnitude),
        "compact": lambda: triton_ops.compact(pool, rows, kept, keep_order=False),
        "compact (order kept)": lambda: triton_ops.compact(pool, rows, kept, keep_order=True),
        "round: vase-dkv": dkv,
        "round: vase-attnv": attnv,
    }
    # A decode step's attention reads every key and value once; at the copy bandwidth that takes:
    attention_seconds = 2 * model.layers * slots * model.kv_heads * model.dim * 2 / bandwidth
    for kernel, size in floors(model, budget, due).items():
        seconds = _seconds(calls[kernel])
        yield Result(
            model.name, budget, due, kernel, size, seconds, size / seconds / bandwidth, seconds / attention_seconds
        )


def markdown(results: list[Result], head: dict[str, object]) -> str:
    lines = [
        f"{head['card']}, copy {head['copy_bytes_per_second'] / 1e12:.2f} TB/s, torch {head['torch']}, "  # type: ignore[operator]
        f"triton {head['triton']}, {head['date']}",
        "",
        "| model | T | due | kernel | MB to move | ms | of copy bandwidth | of a step's attention |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.model} | {r.budget} | {r.due} | {r.kernel} | {r.bytes / 1e6:.1f} | {r.seconds * 1e3:.3f} | "
            f"{r.copy_share:.0%} | {r.attention_share:.2f} |"
        )
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"positive numbers are needed, got {text}")
    return numbers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.kernels", description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--budgets", type=_numbers, default=[1024, 2048, 4096], help="T, default 1024,2048,4096")
    parser.add_argument(
        "--due", type=_numbers, default=[1, 4, 16, 64, 256], help="requests due at once, default 1..256"
    )
    parser.add_argument("--out", type=Path, help="JSON lines: a header, then one result a line")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.models.split(",")) - set(MODELS)):
        parser.error(f"--models: unknown {', '.join(unknown)}; known: {', '.join(MODELS)}")
    if min(args.budgets) <= BUFFER:
        parser.error(f"--budgets must be above the buffer of {BUFFER}, got {min(args.budgets)}")
    if not torch.cuda.is_available():
        print(
            "benchmark.kernels: no CUDA device here; kernel times need a GPU, so nothing was measured.", file=sys.stderr
        )
        return 2
    bandwidth = copy_bandwidth()
    head: dict[str, object] = {
        "card": torch.cuda.get_device_name(),
        "copy_bytes_per_second": bandwidth,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    results: list[Result] = []
    for model in (MODELS[name] for name in args.models.split(",")):
        for budget in args.budgets:
            for due in args.due:
                need = floors(model, budget, due)["projected_norms"] * 1.3 + (2 << 30)
                if need > torch.cuda.mem_get_info()[0]:
                    print(f"{model.name} T {budget}, {due} due: skipped, needs {need / 2**30:.0f} GiB", file=sys.stderr)
                    continue
                print(f"{model.name} T {budget}, {due} due ...", file=sys.stderr)
                results += measure(model, budget, due, bandwidth)
                torch.cuda.empty_cache()
    if args.out:
        args.out.write_text("".join(json.dumps(x) + "\n" for x in (head, *(asdict(r) for r in results))))
    print(markdown(results, head))
    return 0
