"""Who imports whom: no circles, not even through imports inside functions or for type checking."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels/sgl_vase_kernels", "sgl_vase", "python/sgl_vase_srt", "benchmark")


def imports(package: Path) -> dict[str, set[str]]:
    """Module to the modules of the same package that it names in any import statement, wherever it stands."""
    modules = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import is not followed here"
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {path if path in modules else str(node.module) for path in below}
        graph[name] = named & modules.keys() - {name}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle(package: str) -> None:
    graph = imports(ROOT / package)
    assert len(graph) > 5 and any(graph.values())
    assert circle(graph) == []


def test_a_circle_hidden_in_a_function_is_found(tmp_path: Path) -> None:
    package = tmp_path / "made_up"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from made_up import two\n")
    (package / "two.py").write_text("def late():\n    from made_up.one import name\n")
    assert set(circle(imports(package))) == {"made_up.one", "made_up.two"}


def test_the_runtime_side_points_one_way() -> None:
    """plugin -> flags -> install -> hooks -> engine; the tables of refusals import none of them."""
    order = ["compat", "engine", "hooks", "install", "flags", "plugin"]
    for name, named in imports(ROOT / "python/sgl_vase_srt").items():
        part = name.split(".")[1] if "." in name else ""
        if part in order:
            below = {*order[: order.index(part) + 1], "drift"}
            assert {other.split(".")[1] for other in named} <= below, name
