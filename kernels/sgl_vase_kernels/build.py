"""Compile every kernel configuration for GPUs that are not here, and record what the assembler says of each.

``python -m sgl_vase_kernels.build --targets sm_80,sm_90,sm_100`` prints one JSON object a line and fails if a
default configuration spills registers. The operations themselves are called, on small CPU tensors, with the launch
replaced by a compilation: what is built is what would be launched.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from sgl_vase_kernels import triton_ops
from sgl_vase_kernels.layout import KVPool, QueryWindow, Rows
from sgl_vase_kernels.triton_ops import host

TARGETS = ("sm_80", "sm_90", "sm_100")
SHARED_LIMIT = {8: 163 * 1024, 9: 227 * 1024, 10: 227 * 1024}
"""Bytes of shared memory that a program may take, by major compute capability."""
DIMS = (64, 80, 96, 128, 256)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}
OPERATIONS = (
    "value_magnitude",
    "projected_norms",
    "window_attention_scores",
    "cosine_redundancy",
    "mean_direction_cosine",
    "select",
    "compact",
    "store_queries",
)
_WINDOW, _GROUPS, _HEADS, _BUFFER = 64, 4, 8, 64


@dataclass(frozen=True)
class Case:
    """One call of an operation; ``default`` ones must not spill."""

    operation: str
    dtype: str = "bf16"
    dim: int = 128
    page_size: int = 1
    candidates: int = 4096
    options: tuple[tuple[str, Any], ...] = ()
    default: bool = True


def cases(operations: tuple[str, ...], dtypes: tuple[str, ...], dims: tuple[int, ...]) -> Iterator[Case]:
    """All configurations of the named operations, cache dtypes and head dims."""
    for operation in operations:
        if operation == "select":
            for race, sinks, reserve in ((True, False, True), (False, True, False), (True, True, False)):
                chosen = (("race", race), ("reserve", reserve), ("sinks", sinks))
                yield from (Case(operation, candidates=n, options=chosen) for n in (1024, 4096, 8192, 131_072))
            continue
        for dtype in dtypes:
            for dim in dims:
                for options, default in _variants(operation):
                    for page_size in (1, 16) if (dtype, dim) == ("bf16", 128) else (1,):
                        plain = dtype != "fp32" or operation in ("value_magnitude", "compact", "store_queries")
                        yield Case(operation, dtype, dim, page_size, options=options, default=default and plain)


def _variants(operation: str) -> list[tuple[tuple[tuple[str, Any], ...], bool]]:
    if operation == "value_magnitude":
        return [((("kind", kind),), True) for kind in ("range", "absmax", "l2", "variance")]
    if operation == "window_attention_scores":
        vase = (("group", "mean"), ("last", None), ("pool_width", 5), ("pooling", "avg"))
        rkv = (("group", "max"), ("last", 8), ("pool_width", 7), ("pooling", "max"))
        return [(vase, True), (rkv, True)]
    if operation == "cosine_redundancy":
        return [((("spare_newest", None),), True), ((("spare_newest", 0.5),), True)]
    if operation == "compact":
        return [((("keep_order", order),), True) for order in (False, True)]
    return [((), True)]


def _call(case: Case) -> Callable[[], object]:
    """The operation on tensors that only have the right form: nothing is run."""
    dtype, n = DTYPES[case.dtype], case.candidates
    pages = (2, case.page_size, _HEADS, case.dim) if case.page_size == 1 else (2, _HEADS, case.page_size, case.dim)
    k, v = (torch.empty(pages, dtype=dtype) for _ in range(2))
    scale = torch.ones(1) if dtype.itemsize == 1 else None
    pool = KVPool((k,), (v,), "NHD" if case.page_size == 1 else "HND", scale, scale)
    keep, length = n - _BUFFER, n + _BUFFER
    slots = torch.zeros(length, dtype=torch.int64)
    rows = Rows(slots, (length,), _BUFFER, (0,), (keep,), (n // 4,), (4,), (1,), (0,), (0,))
    scores = torch.empty(1, _HEADS, n)
    query_dtype = torch.float32 if dtype == torch.float32 else torch.float16 if case.dtype == "fp16" else torch.bfloat16
    ring = torch.empty(1, 1, _WINDOW, _HEADS * _GROUPS, case.dim, dtype=query_dtype)
    options = dict(case.options)
    if case.operation == "select":
        reserve = scores if options.pop("reserve") else None
        return lambda: triton_ops.select(pool, rows, scores, reserve_score=reserve, sinks_lead=True, **options)
    if case.operation == "window_attention_scores":
        queries = QueryWindow(ring, (0,), (length,), (_WINDOW,), 1.0)
        return lambda: triton_ops.window_attention_scores(pool, rows, queries, **options)
    if case.operation == "compact":
        kept = torch.empty(1, _HEADS, keep, dtype=torch.int64)
        return lambda: triton_ops.compact(pool, rows, kept, **options)
    if case.operation == "store_queries":
        where = torch.zeros(1, dtype=torch.int64)
        return lambda: triton_ops.store_queries(ring[0], where, where, ring[0, :1, 0])
    if case.operation == "projected_norms":
        return lambda: triton_ops.projected_norms(pool, rows, 20, fixed_round=False)
    return lambda: getattr(triton_ops, case.operation)(pool, rows, **options)


def launches(case: Case, capability: tuple[int, int]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernel, arguments and options of each launch of the case on a GPU of ``capability``."""
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    before = host.Target.launch, host.Target.capability

    def record(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        seen.append((kernel, args, options))

    host.Target.launch, host.Target.capability = staticmethod(record), capability
    try:
        _call(case)()
    finally:
        host.Target.launch, host.Target.capability = before
    return seen


def compile_kernel(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: tuple[int, int]
) -> tuple[Any, str]:
    """The compiled kernel and the assembler's log, by the steps of Triton's own launch."""
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    options = {**options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, kwargs = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, kwargs)
    source = ASTSource(kernel, signature, constants, attributes)
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        knobs.cache.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        knobs.cache.dir = cache
        compiled = triton.compile(source, target=target, options=parsed.__dict__)
    return compiled, log.getvalue()


def _capability(target: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"sm_(\d+)(\d)", target)):
        raise argparse.ArgumentTypeError(f"a target looks like sm_90, got {target!r}")
    return int(match[1]), int(match[2])


def _number(pattern: str, log: str) -> int:
    if not (match := re.search(pattern, log)):
        raise RuntimeError(f"the assembler's log has no {pattern!r}:\n{log}")
    return int(match[1])


def build(case: Case, target: str) -> list[dict[str, Any]]:
    """Compile the case's kernels: one record each, sizes in bytes, registers a thread."""
    capability = _capability(target)
    records = []
    for kernel, args, options in launches(case, capability):
        start = time.perf_counter()
        compiled, log = compile_kernel(kernel, args, options, capability)
        records.append(
            {
                "kernel": kernel.__name__,
                "target": target,
                **asdict(case),
                "options": dict(case.options),
                "default": case.default and not _crowded(case, capability),
                "num_warps": compiled.metadata.num_warps,
                "registers": _number(r"Used (\d+) registers", log),
                "shared_bytes": compiled.metadata.shared,
                "stack_bytes": _number(r"(\d+) bytes stack frame", log),
                "spill_store_bytes": _number(r"(\d+) bytes spill stores", log),
                "spill_load_bytes": _number(r"(\d+) bytes spill loads", log),
                "seconds": round(time.perf_counter() - start, 2),
            }
        )
    return records


def _crowded(case: Case, capability: tuple[int, int]) -> bool:
    """24 KiB and more of ``G`` a matrix leave too few registers: it works, slowly."""
    wide = case.operation == "projected_norms" and case.dim > 128
    return wide and (capability[0] == 8 or (capability[0] >= 10 and case.dtype == "bf16"))


def spills(record: dict[str, Any]) -> bool:
    """Whether the configuration spills registers."""
    return bool(record["spill_store_bytes"] or record["spill_load_bytes"])


def too_big(record: dict[str, Any]) -> bool:
    """More shared memory than the target has: the kernel would not launch."""
    limit = SHARED_LIMIT.get(_capability(record["target"])[0])
    return limit is not None and record["shared_bytes"] > limit


def markdown(records: list[dict[str, Any]]) -> str:
    """One line a kernel: the most that any of its configurations takes, for each target."""
    targets = sorted({r["target"] for r in records}, key=lambda t: int(t[3:]))
    lines = [
        "| kernel | configurations | " + " | ".join(f"{t}: registers, shared KiB, spills" for t in targets) + " |",
        "|---|---|" + "---|" * len(targets),
    ]
    for kernel in sorted({r["kernel"] for r in records}):
        cells = []
        for target in targets:
            own = [r for r in records if (r["kernel"], r["target"]) == (kernel, target) and r["default"]]
            if not own:
                cells.append("–")
                continue
            registers, shared = (max(r[field] for r in own) for field in ("registers", "shared_bytes"))
            cells.append(f"≤ {registers}, ≤ {shared / 1024:.1f}, {sum(map(spills, own))}")
        count = len([r for r in records if r["kernel"] == kernel and r["target"] == targets[0] and r["default"]])
        lines.append(f"| `{kernel}` | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _key(record: dict[str, Any]) -> str:
    """What a record is of: two records of one configuration have the same key."""
    named = ("target", "operation", "dtype", "dim", "page_size", "candidates", "options")
    return json.dumps([record[name] for name in named], sort_keys=True)


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


def _targets(text: str) -> tuple[str, ...]:
    targets = tuple(text.split(","))
    for target in targets:
        _capability(target)
    return targets


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; the exit status is 1 if a default configuration fails."""
    parser = argparse.ArgumentParser(prog="python -m sgl_vase_kernels.build", description=__doc__.split("\n")[0])
    parser.add_argument("--targets", type=_targets, default=TARGETS, help="e.g. sm_80,sm_90,sm_100 (default)")
    parser.add_argument("--operations", type=_names(OPERATIONS), default=OPERATIONS, help="default: all")
    parser.add_argument("--dtypes", type=_names(tuple(DTYPES)), default=tuple(DTYPES), help="default: all")
    parser.add_argument(
        "--dims", type=_names(tuple(map(str, DIMS))), default=tuple(map(str, DIMS)), help="default: all"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="append the JSON lines here instead of to standard output; what the file holds is not built again",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table to standard output instead")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    args = parser.parse_args(argv)
    if host.interpreting():
        parser.error("TRITON_INTERPRET is set: the interpreter does not compile; unset it")
    records = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    built = {_key(record) for record in records}
    chosen = [
        (case, target)
        for target in args.targets
        for case in cases(args.operations, args.dtypes, tuple(map(int, args.dims)))
        if _key({**asdict(case), "options": dict(case.options), "target": target}) not in built
    ]
    chosen.sort(key=lambda pair: not pair[0].default)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(args.out.open("a")) if args.out else None if args.markdown else sys.stdout
        pool = stack.enter_context(ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")))
        futures = [pool.submit(build, case, target) for case, target in chosen]
        for done, future in enumerate(as_completed(futures), 1):
            for record in future.result():
                records.append(record)
                if out:
                    print(json.dumps(record), file=out, flush=True)
                print(
                    f"[{done}/{len(futures)}] {record['target']} {record['kernel']} {record['dtype']} {record['dim']}: "
                    f"{record['registers']} registers, {record['shared_bytes']} B shared"
                    + (f", {record['spill_store_bytes']} B SPILLED" if spills(record) else ""),
                    file=sys.stderr,
                )
    if args.markdown:
        print(markdown(records))
    bad = [r for r in records if too_big(r) or (r["default"] and spills(r))]
    for r in bad:
        what = "needs too much shared memory" if too_big(r) else "spills"
        print(
            f"error: {r['kernel']} {what} on {r['target']} ({r['dtype']}, dim {r['dim']}, {r['options']})",
            file=sys.stderr,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
