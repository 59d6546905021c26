"""The flags: what is accepted, what is refused and in which words."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import pytest
from sgl_vase_srt.engine import current
from sgl_vase_srt.flags import VaseServerArgs

from sgl_vase import policy_names


def parse(*flags: str) -> VaseServerArgs:
    from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass

    parser = argparse.ArgumentParser()
    add_cli_args_from_dataclass(parser, VaseServerArgs)
    return VaseServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy", *flags]))


@pytest.fixture(autouse=True)
def _inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "config", None)


def test_off_by_default() -> None:
    assert parse().eviction_settings() is None


@pytest.mark.parametrize("name", policy_names())
def test_every_registered_policy_is_a_choice(name: str) -> None:
    config = parse("--eviction", name).eviction_settings()
    assert config is not None and config.budget == 4096 and config.buffer == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--eviction-budget", "64"), "--eviction-budget has no effect without --eviction"),
        (("--eviction", "vase", "--eviction-budget", "64"), "--eviction-budget must be >= 65, got 64"),
        (("--eviction", "vase", "--eviction-budget", "0"), "--eviction-budget must be >= 65, got 0"),
        (("--eviction", "vase", "--eviction-buffer", "0"), "--eviction-buffer must be >= 1, got 0"),
        (("--eviction", "vase", "--eviction-buffer", "-3"), "--eviction-buffer must be >= 1, got -3"),
        (
            ("--eviction", "vase", "--eviction-budget", "256", "--eviction-value-tokens", "193"),
            "--eviction-value-tokens must be in [0, 192], got 193",
        ),
        (
            ("--eviction", "vase", "--eviction-min-private", "64"),
            "--eviction-min-private must be in [65, 4096], got 64",
        ),
        (("--eviction", "vase", "--eviction-seed", "-1"), "--eviction-seed must be in"),
        (("--eviction", "vase", "--eviction-config", "/nowhere.json"), "--eviction-config /nowhere.json"),
    ],
)
def test_refused_in_one_sentence(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*flags)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_unknown_policy_and_fractions_are_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--eviction", "lru"), ("--eviction", "vase", "--eviction-budget", "1.5")):
        with pytest.raises(SystemExit) as stop:
            parse(*flags)
        assert stop.value.code == 2
    assert "vase" in capsys.readouterr().err


def test_keywords_raise_instead_of_exiting() -> None:
    with pytest.raises(ValueError, match="--eviction-budget must be >= 65"):
        VaseServerArgs(model_path="dummy", eviction="vase", eviction_budget=10).eviction_settings()


def test_config_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "eviction.json"
    file.write_text(json.dumps({"budget": 512, "buffer": 32, "options": {"sampling": False}}))
    config = parse(
        "--eviction", "vase", "--eviction-config", str(file), "--eviction-budget", "1024"
    ).eviction_settings()
    assert config is not None
    assert (config.policy, config.budget, config.buffer, dict(config.options)) == (
        "vase-attnv",
        1024,
        32,
        {"sampling": False},
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "eviction-config"),
        ("[1]", "a JSON object is needed"),
        ('{"budgets": 1}', "unknown budgets"),
        ('{"budget": 300.5}', "--eviction-budget must be a whole number"),
        ('{"options": {"magnitud": "l2"}}', "no option magnitud"),
        ('{"options": {"magnitude": "l3"}}', "must be one of range"),
    ],
)
def test_bad_config_files(tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "eviction.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        parse("--eviction", "vase", "--eviction-config", str(file))
    assert words in capsys.readouterr().err


def test_a_pickled_record_activates_eviction_where_it_arrives() -> None:
    off = pickle.loads(pickle.dumps(VaseServerArgs(model_path="dummy")))
    assert off.eviction == "none" and current.config is None
    pickle.loads(pickle.dumps(VaseServerArgs(model_path="dummy", eviction="vase", eviction_budget=300)))
    assert current.config is not None and current.config.budget == 300
