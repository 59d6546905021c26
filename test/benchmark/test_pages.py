"""The part of a page that a benchmark writes."""

import lzma
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from benchmark.accuracy import retrieval
from benchmark.accuracy import run as accuracy
from benchmark.common import pages
from benchmark.fidelity import run as fidelity
from benchmark.serving import hit_rate, throughput

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *((command, "--docs") for command in (accuracy, fidelity, hit_rate, retrieval, throughput)),
        *((command, "--summary") for command in (accuracy, throughput)),
    ],
)
def test_a_missing_page_is_refused_before_the_work(
    command: ModuleType, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([flag, str(tmp_path / "none.md")])
    assert f"{flag}: {tmp_path / 'none.md'}: no such file" in capsys.readouterr().err


def test_only_the_generated_part_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Ours\n")
    for body in ("first\n", "second\n"):
        pages.rewrite(page, "<!-- generated: a -->", body)
        pages.rewrite(page, "<!-- generated: b -->", "other\n")
    text = page.read_text()
    assert text.startswith("# Ours\n") and "second" in text and "first" not in text
    assert text.count(pages.END) == 2 and text.count("other") == 1


@pytest.mark.parametrize(
    ("command", "results", "arguments", "tables", "summary"),
    [
        (throughput, "throughput", ["--model", "any"], "benchmarks-throughput.md", "benchmarks.md"),
        (accuracy, "accuracy", [], "accuracy-reasoning.md", "accuracy.md"),
        (retrieval, "retrieval", ["--model", "any"], "accuracy-retrieval.md", None),
    ],
)
def test_the_pages_are_what_the_recorded_results_give(
    command: ModuleType, results: str, arguments: list[str], tables: str, summary: str | None, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(ROOT / "benchmark" / "results" / results, out)
    for packed in out.glob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    arguments = [*arguments, "--out", str(out), "--redraw"]
    for flag, name in {"--docs": tables, **({"--summary": summary} if summary else {})}.items():
        arguments += [flag, shutil.copy(ROOT / "docs" / name, tmp_path)]
    assert command.main(arguments) == 0
    for name in filter(None, (tables, summary)):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()
