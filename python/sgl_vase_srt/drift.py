"""Which SGLang functions that this package hooks or uses differ between the pinned release and another one.

``pinned.json`` holds two digests of each function in the pinned release: of its signature (with the decorators) and
of its body. Sources are read, never imported. Comments, layout and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PINNED = Path(__file__).with_name("pinned.json")

USED = [f"sglang.srt.{name}" for name in Path(__file__).with_name("used.txt").read_text().split()]
"""Functions and classes that are called, or whose effects are relied on, without being hooked."""


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
            parser.error(f"--pin does not find {', '.join(gone)}: correct the hooks, or used.txt")
        functions = {target: " ".join(digests) for target, (digests, _) in found.items()}
        PINNED.write_text(json.dumps({"sglang": version, "functions": functions}, indent=1) + "\n")
        print(f"{len(functions)} functions of SGLang {version} written to {PINNED}")
        return 0
    pinned = json.loads(PINNED.read_text())
    lines = []
    for target, (now, place) in found.items():
        then = pinned["functions"].get(target, "").split()
        differing = [part for part, a, b in zip(("signature", "body"), now, then, strict=False) if a != b]
        state = "missing" if not now else "new" if not then else (*differing, "same")[0]
        lines.append((state, "hooked" if target in hooked else "used  ", target, place))
    order = ("missing", "signature", "body", "new", "same")
    for state, *rest in sorted(lines, key=lambda line: order.index(line[0])):
        if state != "same":
            print("  ".join((state.ljust(9), *rest)))
    counts = Counter(state for state, *_ in lines)
    print(
        f"SGLang {release} against {pinned['sglang']}: of {len(found)} functions {counts['same']} are the same, "
        f"{counts['missing']} are missing, {counts['signature']} have another signature, {counts['body']} only another "
        f"body, {counts['new']} are not in pinned.json yet."
    )
    return int(counts["same"] != len(found))
