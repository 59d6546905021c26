"""The part of a page that a benchmark writes."""

from pathlib import Path
from types import ModuleType

import pytest

from benchmark.accuracy import retrieval
from benchmark.accuracy import run as accuracy
from benchmark.common import pages
from benchmark.fidelity import run as fidelity
from benchmark.serving import hit_rate, plot


@pytest.mark.parametrize("command", [accuracy, fidelity, hit_rate, plot, retrieval])
def test_a_missing_page_is_refused_before_the_work(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--docs", str(tmp_path / "none.md")])
    assert f"--docs: {tmp_path / 'none.md'}: no such file" in capsys.readouterr().err


def test_only_the_generated_part_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Ours\n")
    for body in ("first\n", "second\n"):
        pages.rewrite(page, "<!-- generated: a -->", body)
        pages.rewrite(page, "<!-- generated: b -->", "other\n")
    text = page.read_text()
    assert text.startswith("# Ours\n") and "second" in text and "first" not in text
    assert text.count(pages.END) == 2 and text.count("other") == 1
