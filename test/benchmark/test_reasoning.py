"""The reasoning task, its trainer and the weights in the repository."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from benchmark.accuracy.reasoning import task, tokenizer, train

SHIPPED = Path(train.__file__).parent / "model"
TINY = train.Plan(
    stages=(train.Stage(3, 4, 4, 200), train.Stage(3, 4, 7, 300)), hidden=32, feed_forward=32, layers=2, compile=False
)


def test_same_arguments_give_same_problems_and_longer_lists_extend_shorter_ones() -> None:
    assert task.problems("train", 5, 3, 12) == task.problems("train", 9, 3, 12)[:5]
    assert task.problems("train", 5, 3, 12) != task.problems("train", 5, 4, 12)


def test_splits_share_no_program() -> None:
    train_prompts, test_prompts = (
        {problem.prompt for problem in task.problems(split, 2000, 0, 1, 1)} for split in ("train", "test")
    )
    assert not train_prompts & test_prompts
    assert {task.split_of(prompt) for prompt in test_prompts} == {"test"}


def test_training_never_sees_a_test_program() -> None:
    for step in range(TINY.steps):
        data = train.batch(TINY, step)
        for row in data.ids[:, : data.prompt].tolist():
            assert task.split_of(" ".join(task.VOCABULARY[index] for index in row)) == "train"


def test_functions_are_permutations() -> None:
    for function in task.FUNCTIONS:
        assert {task.apply(function, value) for value in range(10)} == set(range(10))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_chain_is_what_running_the_prompt_gives(spread: float) -> None:
    for problem in task.problems("test", 20, 1, 40, spread=spread):
        head, rest = problem.prompt.removeprefix("program ").split(" ; ")
        body, asked = rest.removesuffix(" :").split(" ? ")
        words = head.split()
        values = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        chain = []
        words = body.split()
        for name, function, operand in zip(words[::3], words[1::3], words[2::3], strict=True):
            factor, offset = task.FUNCTIONS[function]
            values[name] = (factor * values[operand] + offset) % 10
            before, after = values[operand], values[name]
            chain.append(f"{name} {function} {operand} {operand} {before} {function} {before} {after} {name} {after}")
        answer = " ".join(["?", *(f"{name} {values[name]}" for name in asked.split())])
        assert problem.answer == answer
        assert problem.chain == " ".join([*chain, answer, "<eos>"])


def test_popular_operands_need_spread() -> None:
    def most_used(spread: float) -> int:
        chains = [problem.chain.split() for problem in task.problems("test", 20, 0, 96, spread=spread)]
        return sum(
            max(chain[2 : 96 * task.STEP : task.STEP].count(name) for name in task.VARIABLES) for chain in chains
        )

    assert most_used(1.0) > 2 * most_used(0.0)


def test_grading_accepts_only_the_right_answer() -> None:
    for problem in task.problems("test", 10, 2, 12):
        assert task.grade(problem, problem.chain)
        assert task.grade(problem, problem.answer)
        assert task.first_error(problem, problem.chain) is None
        words = problem.answer.split()
        for index in range(2, len(words), 2):
            wrong = [*words[:index], str((int(words[index]) + 1) % 10), *words[index + 1 :]]
            assert not task.grade(problem, " ".join(wrong))
        assert not task.grade(problem, "")
        assert not task.grade(problem, problem.answer + " 3")
        assert not task.grade(problem, " ".join(words[:-2]))


def test_parts_of_an_answer_count() -> None:
    problem = task.problems("test", 1, 5, 10)[0]
    assert task.values_right(problem, problem.chain) == 1
    words = problem.chain.split()
    words[-2] = str((int(words[-2]) + 1) % 10)  # the last value; <eos> follows
    assert task.values_right(problem, " ".join(words)) == 0.75
    assert task.values_right(problem, "") == 0


def test_first_error_names_the_kind_of_token() -> None:
    problem = task.problems("test", 1, 5, 10)[0]
    words = problem.chain.split()

    def changed(index: int, word: str) -> str:
        return " ".join([*words[:index], word, *words[index + 1 :]])

    def other(index: int) -> str:
        return str((int(words[index]) + 1) % 10)

    assert task.first_error(problem, changed(44, other(44))) == "lookup"
    assert task.first_error(problem, changed(47, other(47))) == "result"
    assert task.first_error(problem, changed(41, "?")) == "format"
    assert task.first_error(problem, changed(len(words) - 2, other(len(words) - 2))) == "lookup"
    assert task.first_error(problem, " ".join(words[:20])) == "format"
    assert task.first_error(problem, problem.chain + " 4") == "format"


def test_impossible_programs_are_refused() -> None:
    for lines, queries in ((0, 1), (4, 5), (task.MAX_LINES + 1, 4), (4, 0)):
        with pytest.raises(ValueError, match="lines"):
            task.draw(random.Random(0), lines, queries, 0.0)


def test_tokenizer_keeps_every_word(tmp_path: Path) -> None:
    tokenizer.build().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    problem = task.problems("test", 1, 0, task.MAX_LINES)[0]
    for text in (problem.prompt, problem.chain, " ".join(task.VOCABULARY)):
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text


def state(trainer: train.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = train.Trainer(TINY)
    begin = state(whole)
    for step in range(TINY.steps):
        if step == 2:
            whole.save(tmp_path / "half.pt")
        whole.advance()
    resumed = train.Trainer.load(tmp_path / "half.pt", TINY)
    while resumed.step < TINY.steps:
        resumed.advance()
    assert all(torch.equal(value, state(resumed)[name]) for name, value in state(whole).items())
    assert not torch.equal(begin["model.norm.weight"], whole.model.state_dict()["model.norm.weight"])


def test_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    train.Trainer(TINY).save(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="another training plan"):
        train.Trainer.load(tmp_path / "state.pt", dataclasses.replace(TINY, seed=1))


def test_exported_model_loads_and_its_card_tells_how_it_was_made(tmp_path: Path) -> None:
    trainer = train.Trainer(TINY)
    trainer.advance()
    trainer.export(tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.norm.weight, trainer.model.model.norm.weight.to(torch.bfloat16))
    assert f"{sum(each.numel() for each in trainer.model.parameters()):,} parameters" in (
        tmp_path / "README.md"
    ).read_text().replace("\n", " ")
    report = train.check(tmp_path, lines=4, n=4)
    assert report["accuracy"] == 0  # one step teaches nothing: the grader must say so


def test_accuracies_tell_kinds_apart() -> None:
    problem = task.problems("train", 1, 0, 5, 2)[0]
    words = problem.chain.split()
    right = torch.ones(1, len(words), dtype=torch.bool)
    assert train.accuracies(right, 5) == {"lookup": 1.0, "result": 1.0, "format": 1.0}
    right[0, 4] = False
    right[0, -2] = False
    found = train.accuracies(right, 5)
    assert found["lookup"] == pytest.approx(5 / 7)
    assert found["result"] == found["format"] == 1.0


def test_shipped_weights_are_small_and_right() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 20e6
    loaded = AutoTokenizer.from_pretrained(SHIPPED)
    problem = task.problems("test", 1, 0, 24)[0]
    assert loaded.encode(problem.prompt) == tokenizer.encode(problem.prompt)
    assert train.check(SHIPPED, lines=24, n=16)["accuracy"] >= 0.9
