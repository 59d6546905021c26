"""Which SGLang functions that this package hooks or uses differ between the pinned release and another one.

``pinned.json`` holds two digests of each function in the pinned release: of its signature (with the decorators) and
of its body. Sources are read, never imported. Comments, layout and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PINNED = Path(__file__).with_name("pinned.json")

# Functions and classes below sglang.srt that are called, or whose effects are relied on, without being hooked.
_USED = """
    arg_groups.arg_utils: Arg add_cli_args_from_dataclass; arg_groups.model_override_base: model_config_of
    resolving_view; configs.hybrid_arch: mambaish_config; configs.model_config: ModelConfig.__init__
    ModelConfig.get_num_kv_heads ModelConfig.get_total_num_kv_heads; entrypoints.engine: Engine.__init__
    Engine._launch_scheduler_processes Engine.server_args_class; entrypoints.openai.protocol: UsageInfo; environ:
    EnvField.get; layers.radix_attention: AttentionType RadixAttention.__init__ RadixAttention.forward;
    managers.data_parallel_controller: DataParallelController._record_scheduler_init_infos; managers.schedule_batch:
    FINISH_ABORT Req.__init__ Req.init_next_round_input Req.owned_kv_len Req.refresh_fill_ids Req.seqlen ReqKvInfo
    ScheduleBatch.filter_batch ScheduleBatch.merge_batch ScheduleBatch.mix_with_running
    ScheduleBatch.prepare_for_decode ScheduleBatch.prepare_for_extend ScheduleBatch.retract_decode release_req;
    managers.scheduler: Scheduler.event_loop_normal Scheduler.event_loop_overlap Scheduler.pause_generation
    Scheduler.run_batch Scheduler.send_abort_output Scheduler.update_running_batch _make_abort_req;
    managers.scheduler_components.batch_result_processor: SchedulerBatchResultProcessor.process_batch_result_decode
    SchedulerBatchResultProcessor.process_batch_result_prefill; managers.scheduler_components.output_streamer:
    SchedulerOutputStreamer._stream_output_generation SchedulerOutputStreamer.build_additional_customized_info;
    mem_cache.allocation: alloc_for_decode_default alloc_for_extend; mem_cache.allocator.paged:
    PagedTokenToKVPoolAllocator.alloc; mem_cache.allocator.token: TokenToKVPoolAllocator.alloc;
    mem_cache.base_prefix_cache: BasePrefixCache.free_kv_row; mem_cache.common: evict_from_tree_cache
    free_kv_row_segments match_kv_cache; mem_cache.memory_pool: KVCache.__init__ MHATokenToKVPool.__init__
    ReqToTokenPool; mem_cache.unified_radix_cache: UnifiedRadixCache.checkpoint UnifiedRadixCache.unlock;
    model_executor.forward_batch_info: ForwardMode; model_executor.pool_configurator:
    DefaultPoolConfigurator.__init__; platforms.cpu: CpuDeviceMixin; platforms.device_mixin: PlatformEnum;
    platforms.interface: PlatformCapabilities SRTPlatform; plugins: load_plugins; plugins.hook_registry:
    HookRegistry HookType _propagate_patch _wrap_fn; runtime_context: get_parallel get_schedule;
    sampling.sampling_params: SamplingParams; server_args: ServerArgs.from_cli_args ServerArgs.resolve_once
    ServerArgs.resolved_dict
"""
_MODULES = (entry.partition(":") for entry in _USED.split(";"))
USED = [f"sglang.srt.{module.strip()}.{name}" for module, _, names in _MODULES for name in names.split()]


def _text(node: object) -> str:
    """A syntax tree without docstrings as text, the same in every version of Python (``ast.unparse`` is not)."""
    match node:
        case ast.Expr(ast.Constant(str())):
            return ""
        case ast.AST():
            filled = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
            return f"{type(node).__name__}({', '.join(f'{name}={_text(value)}' for name, value in filled)})"
        case list():
            return f"[{', '.join(filter(None, map(_text, node)))}]"
    return ascii(node)


def _definitions(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """All definitions of ``name`` in a module or class: a property, or a function under an ``if``, has several."""
    for node in ast.iter_child_nodes(scope):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if name in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _definitions(node, name)


@cache
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def look_up(root: Path, target: str) -> tuple[list[str], str]:
    """Digests of signature and body of ``target`` below ``root`` (none if not defined there), and ``file:line``."""
    folder, parts = root, target.split(".")
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    file = folder / f"{parts[0]}.py"
    file, parts = (file, parts[1:]) if file.is_file() else (folder / "__init__.py", parts)
    nodes: list[ast.AST] = [_module(file)]
    for name in parts:
        nodes = [found for node in nodes for found in _definitions(node, name)]
    heads = ("decorator_list", "args", "returns", "bases", "keywords", "annotation")
    signature = [[type(node).__name__, *(getattr(node, field, None) for field in heads)] for node in nodes]
    body = [getattr(node, "body", getattr(node, "value", None)) for node in nodes]
    digests = [hashlib.sha256(_text(part).encode()).hexdigest()[:16] for part in (signature, body) if nodes]
    line = "".join(f":{getattr(node, 'lineno', 1)}" for node in nodes[:1])
    return digests, file.relative_to(root).as_posix() + line


def main(hooked: Sequence[str], argv: Sequence[str], version: str) -> int:
    """Compare or pin ``hooked`` and ``USED``; ``version`` is the SGLang release that this package is for."""
    parser = argparse.ArgumentParser("python -m sgl_vase_srt.install", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drift", action="store_true", help="report what differs; exit status 1 if anything does")
    parser.add_argument("--pin", action="store_true", help="write pinned.json from the installed release")
    parser.add_argument("--source", type=Path, metavar="DIR", help="an unpacked SGLang, instead of the installed one")
    options = parser.parse_args(argv)
    if options.drift == options.pin or (options.pin and options.source):
        parser.error("give --drift, with or without --source DIR, or --pin alone")
    spec = find_spec("sglang")
    root = options.source or (Path(spec.origin).parents[1] if spec and spec.origin else Path())
    root = root / "python" if (root / "python/sglang").is_dir() else root
    if not (root / "sglang/srt").is_dir():
        parser.error(f"no sglang/srt in {root}: name an unpacked wheel or a checkout of SGLang with --source DIR")
    release = f"in {options.source}" if options.source else metadata.version("sglang")
    found = {target: look_up(root, target) for target in sorted({*hooked, *USED})}
    if options.pin:
        if release != version:
            parser.error(f"--pin needs sglang=={version}, found {release}: install it, or change SGLANG_VERSION first")
        if gone := [target for target, (digests, _) in found.items() if not digests]:
            parser.error(f"--pin does not find {', '.join(gone)}: correct the hooks, or _USED in drift.py")
        functions = {target: " ".join(digests) for target, (digests, _) in found.items()}
        PINNED.write_text(json.dumps({"sglang": version, "functions": functions}, indent=1) + "\n")
        print(f"{len(functions)} functions of SGLang {version} written to {PINNED}")
        return 0
    pinned = json.loads(PINNED.read_text())
    states: dict[str, list[str]] = {"missing": [], "signature": [], "body": [], "new": [], "same": []}
    for target, (now, place) in found.items():
        then = pinned["functions"].get(target, "").split()
        differing = [part for part, a, b in zip(("signature", "body"), now, then, strict=False) if a != b]
        state = "missing" if not now else "new" if not then else (*differing, "same")[0]
        states[state].append(f"{state:9}  {'hooked' if target in hooked else 'used':6}  {target}  {place}")
    same = len(states.pop("same"))
    for line in (line for lines in states.values() for line in lines):
        print(line)
    missing, signature, body, new = map(len, states.values())
    print(
        f"SGLang {release} against {pinned['sglang']}: of {len(found)} functions {same} are the same, {missing} are "
        f"missing, {signature} have another signature, {body} only another body, {new} are not in pinned.json yet."
    )
    return int(same != len(found))
