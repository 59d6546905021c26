"""``--drift``: what the pinned digests say of the installed SGLang and of made-up changes to it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from sgl_vase_srt import drift
from sgl_vase_srt.install import SGLANG_VERSION, targets

HOOKED = targets()
ROOT = Path(__file__).parents[2]

Report = Callable[..., tuple[int, list[str]]]
FINISH = "sglang.srt.managers.scheduler.Scheduler.finish"
MODULE = '''
class Scheduler:
    @property
    def size(self) -> int:
        return 1

    def finish(self, req, *, abort: bool = False) -> None:
        """What it does."""
        if abort:
            req.release("row")  # why
'''


def test_pinned_digests_are_those_of_the_installed_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(HOOKED, ["--drift"], SGLANG_VERSION) == 0, capsys.readouterr().out
    pinned = json.loads(drift.PINNED.read_text())
    assert pinned["functions"].keys() == {*HOOKED, *drift.USED}, "run --pin"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"sglang=={pinned['sglang']}"] == [f"sglang=={SGLANG_VERSION}"]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """``report(source)``: exit status and lines of ``--drift`` for ``FINISH``; pinned is ``MODULE``."""
    file = tmp_path / "sglang" / "srt" / "managers" / "scheduler.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODULE)
    digests, _ = drift.look_up(tmp_path, FINISH)
    pinned = tmp_path / "pinned.json"
    pinned.write_text(json.dumps({"sglang": "1.0", "functions": {FINISH: " ".join(digests)}}))
    monkeypatch.setattr(drift, "PINNED", pinned)
    monkeypatch.setattr(drift, "USED", [])
    monkeypatch.setattr(drift, "_module", drift._module.__wrapped__)  # the file is rewritten

    def run(source: str, hooked: list[str] | None = None) -> tuple[int, list[str]]:
        file.write_text(source)
        status = drift.main(hooked or [FINISH], ["--drift", "--source", str(tmp_path)], "1.0")
        return status, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    "source",
    [
        MODULE,
        MODULE.replace("  # why", ""),
        MODULE.replace('        """What it does."""\n', ""),
        MODULE.replace('"""What it does."""', '"""Something else."""\n\n        # a comment'),
        MODULE.replace('"row"', "'row'").replace("self, req, *", "\n        self,\n        req,\n        *"),
        MODULE.replace("return 1", "return 2"),  # another function
        f"if True:\n{MODULE.replace(chr(10), chr(10) + '    ')}",
    ],
    ids=["nothing", "comment", "no docstring", "other docstring", "layout", "another function", "under an if"],
)
def test_what_does_not_count(report: Report, source: str) -> None:
    status, (summary,) = report(source)
    assert status == 0
    assert "of 1 functions 1 are the same" in summary


@pytest.mark.parametrize(
    ("state", "old", "new"),
    [
        ("body", "if abort:", "if not abort:"),
        ("body", '"row"', '"page"'),
        ("signature", "abort: bool = False", "abort: bool = True"),
        ("signature", "self, req, *", "self, req"),
        ("signature", "def finish", "async def finish"),
        ("signature", "    def finish", "    @staticmethod\n    def finish"),
        ("missing", "def finish", "def end"),
        ("missing", "class Scheduler", "class OtherScheduler"),
    ],
)
def test_what_counts(report: Report, state: str, old: str, new: str) -> None:
    status, (line, summary) = report(MODULE.replace(old, new))
    assert status == 1
    assert line.split()[:3] == [state, "hooked", FINISH]
    assert line.split()[3].startswith("sglang/srt/managers/scheduler.py" + (":" if state != "missing" else ""))
    assert "of 1 functions 0 are the same" in summary


def test_an_inherited_or_imported_function_is_missing_and_an_unpinned_one_is_new(report: Report) -> None:
    source = f"from base import helper\n{MODULE}\nclass Child(Scheduler):\n    pass\n"
    module = "sglang.srt.managers.scheduler"
    hooked = [f"{module}.Child.finish", f"{module}.Scheduler.size", f"{module}.helper", "sglang.srt.gone.f", FINISH]
    status, lines = report(source, hooked)
    assert status == 1
    assert [line.split()[0] + " " + line.split()[2].removeprefix("sglang.srt.") for line in lines[:-1]] == [
        "missing gone.f",
        "missing managers.scheduler.Child.finish",
        "missing managers.scheduler.helper",
        "new managers.scheduler.Scheduler.size",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --drift, with or without --source DIR, or --pin alone"),
        (["--pin", "--source", "."], "give --drift"),
        (["--drift", "--source", "nowhere"], "no sglang/srt in nowhere: name .* with --source DIR"),
        (["--pin"], r"--pin needs sglang==9\.9, found .*: install it, or change SGLANG_VERSION first"),
    ],
)
def test_wrong_use_ends_in_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = drift.PINNED.read_bytes()
    with pytest.raises(SystemExit) as stop:
        drift.main(HOOKED, argv, "9.9")
    assert stop.value.code == 2
    assert re.search(f"error: {message}", capsys.readouterr().err)
    assert drift.PINNED.read_bytes() == before


def test_what_is_not_found_cannot_be_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drift.main([*HOOKED, "sglang.srt.gone.f"], ["--pin"], SGLANG_VERSION)
    assert "--pin does not find sglang.srt.gone.f: correct the hooks, or used.txt" in capsys.readouterr().err


def test_pin_writes_what_drift_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = drift.PINNED.read_text()
    monkeypatch.setattr(drift, "PINNED", tmp_path / "pinned.json")
    assert drift.main(HOOKED, ["--pin"], SGLANG_VERSION) == 0
    assert drift.PINNED.read_text() == committed


def test_functions_of_packages_are_found() -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    digests, place = drift.look_up(Path(spec.origin).parents[1], "sglang.srt.plugins.load_plugins")
    assert len(digests) == 2
    assert place.startswith("sglang/srt/plugins/__init__.py:")
