"""The short soak: two server mixes, one overbooked, one with forced retraction. And what it would say about a fault."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.serving import soak

JOB = soak.Job("job", (1, 2, 3), 40, logprobs="prompt")
ANSWER: dict[str, Any] = {
    "output_ids": [5] * 40,
    "meta_info": {
        "id": "job",
        "finish_reason": {"type": "length"},
        "completion_tokens": 40,
        "num_retractions": 0,
        "eviction": {"evictions": 1, "kv_tokens": 100},
        "input_token_logprobs": [[-1.0, 5, None]] * 3,
        "output_token_logprobs": [[-1.0, 5, None]] * 40,
        "output_top_logprobs": [[[-1.0, 5, None], [-1.1, 6, None]]] * 40,
    },
}


def answer(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(ANSWER)
    changed["meta_info"].update(changes)
    return changed


@pytest.mark.e2e
@pytest.mark.long
def test_soak(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = soak.main(["--model", str(tiny), "--requests", "100", "--seed", "3", "--mixes", "1,2", "--sample", "15"])
    said = capsys.readouterr().out.splitlines()
    summary = json.loads(said[-1])
    assert status == 0 and summary["violations"] == 0, said
    assert summary["evicted"] > 30 and summary["retracted"] > 5, summary
    assert summary["solo runs compared"] >= 5 and summary["cached prefixes compared"] >= 2, summary


@pytest.mark.parametrize(
    "fault",
    [
        {"error": "no meta_info"},
        answer(finish_reason={"type": "abort"}),
        answer(completion_tokens=39, output_token_logprobs=[[-1.0, 5, None]] * 39),
        answer(eviction={"evictions": 1, "kv_tokens": 162}),
        answer(input_token_logprobs=[]),
        answer(output_token_logprobs=[]),
    ],
)
def test_a_faulty_answer_is_a_violation(fault: dict[str, Any]) -> None:
    load = soak.Load(None, soak.MIXES[0])  # type: ignore[arg-type]
    load.check(JOB, ANSWER)
    assert load.violations == []
    load.check(JOB, fault)
    assert len(load.violations) == 1


@pytest.mark.parametrize(
    "alone",
    [{**ANSWER, "output_ids": [5] * 39 + [6]}, answer(output_token_logprobs=[[-1.1, 5, None]] * 40)],
    ids=["tokens", "numbers"],
)
def test_another_solo_run_is_a_difference(alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load = soak.Load(None, soak.MIXES[0])  # type: ignore[arg-type]
    replies = iter([ANSWER, alone])
    monkeypatch.setattr(load, "send", lambda job: next(replies))
    assert load.compare("compared", JOB, ANSWER) is None
    assert load.compare("compared", JOB, ANSWER)


def test_a_tie_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    load = soak.Load(None, soak.MIXES[0])  # type: ignore[arg-type]
    for second, tie in ((-1.1, False), (-1.0001, True)):
        alone = answer(output_top_logprobs=[[[-1.0, 5, None], [second, 6, None]]] * 40)
        alone["output_ids"][39] = 6
        monkeypatch.setattr(load, "send", lambda job, alone=alone: alone)
        assert (load.compare("compared", JOB, ANSWER) is None) == tie


@pytest.mark.parametrize(("mix", "violations"), [(0, 1), (1, 0)])
def test_only_mixed_steps_may_round(mix: int, violations: int) -> None:
    load = soak.Load(None, soak.MIXES[mix])  # type: ignore[arg-type]
    load.judge(["one"], 10)
    assert len(load.violations) == violations
    load.judge(["one", "two"], 10)
    assert len(load.violations) == violations + 2
