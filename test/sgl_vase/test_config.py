"""The configuration: what it refuses, and the arithmetic of budgets."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vase import EvictionConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "vases"}, r"--eviction must be one of none, vase, vase-attnv, .*got 'vases'"),
        ({"buffer": 0}, r"--eviction-buffer must be >= 1, got 0"),
        ({"buffer": -1}, r"--eviction-buffer must be >= 1, got -1"),
        ({"buffer": 64.0}, r"--eviction-buffer must be a whole number, got 64.0"),
        ({"buffer": True}, r"--eviction-buffer must be a whole number, got True"),
        ({"budget": 64}, r"--eviction-budget must be >= 65, got 64"),
        ({"budget": -4096}, r"--eviction-budget must be >= 65, got -4096"),
        ({"budget": 512.5}, r"--eviction-budget must be a whole number, got 512.5"),
        ({"budget": "512"}, r"--eviction-budget must be a whole number, got '512'"),
        ({"budget": 512, "value_tokens": 449}, r"--eviction-value-tokens must be in \[0, 448\], got 449"),
        ({"value_tokens": -1}, r"--eviction-value-tokens must be in \[0, 4032\], got -1"),
        ({"value_tokens": 0.25}, r"--eviction-value-tokens must be a whole number, got 0.25"),
        ({"min_private": 64}, r"--eviction-min-private must be in \[65, 4096\], got 64"),
        ({"min_private": 4097}, r"--eviction-min-private must be in \[65, 4096\], got 4097"),
        ({"prefix": "pin"}, r"--eviction-prefix must be one of protect, detach, got 'pin'"),
        ({"prefill": True}, r"--eviction-prefill must be one of off, on, got True"),
        ({"seed": -1}, r"--eviction-seed must be in \[0, 18446744073709551615\], got -1"),
        ({"seed": 2**64}, r"--eviction-seed must be in"),
        ({"options": {"sampled": True}}, r"--eviction vase-attnv has no option sampled; known: magnitude, pool_width"),
        ({"policy": "snapkv", "options": {"sinks": True}}, r"--eviction snapkv has no option sinks; known: none"),
        ({"options": {"sampling": 1}}, r"option sampling must be true or false, got 1"),
    ],
)
def test_bad_values_name_the_flag_and_the_range(fields, message):
    with pytest.raises(ValueError, match=message):
        EvictionConfig(**fields)


def test_bounds_themselves_are_allowed():
    EvictionConfig(budget=65, buffer=64, value_tokens=1, min_private=65, seed=2**64 - 1)
    EvictionConfig(budget=2, buffer=1, value_tokens=0, min_private=2)


@given(prompt=st.integers(0, 2000), budget=st.integers(66, 1000), data=st.data())
def test_what_is_shared_of_a_long_prompt_never_raises_the_target(prompt, budget, data):
    floor = data.draw(st.integers(65, budget))
    config = EvictionConfig(budget=budget, min_private=floor, prefill="on")
    shared = config.shared(prompt)
    assert config.target(shared) == budget
    assert shared == prompt or config.target(shared + 1) == budget + 1
    assert dataclasses.replace(config, prefill="off").shared(prompt) == prompt


def test_alias_becomes_the_name_and_nothing_can_be_changed():
    options = {"magnitude": "l2"}
    config = EvictionConfig("vase", options=options)
    options["magnitude"] = "range"
    assert config.policy == "vase-attnv"
    assert config.as_dict()["options"] == {"magnitude": "l2"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1
    with pytest.raises(TypeError):
        config.options["magnitude"] = "range"


def test_from_json(tmp_path):
    path = tmp_path / "eviction.json"
    path.write_text(json.dumps({"policy": "r-kv", "budget": 1024, "options": {"lam": 0.1}}))
    config = EvictionConfig.from_json(path, budget=2048, buffer=None)
    assert (config.policy, config.budget, config.buffer, config.options["lam"]) == ("r-kv", 2048, 64, 0.1)
    assert EvictionConfig(**config.as_dict()) == config
    for text, message in (
        ('{"budgets": 1}', r"unknown budgets; known: budget, buffer"),
        ("[1]", "a JSON object is needed, got list"),
        ("{", "Expecting property name"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"--eviction-config .*{message}"):
            EvictionConfig.from_json(path)
    with pytest.raises(ValueError, match=r"--eviction-config .*No such file"):
        EvictionConfig.from_json(tmp_path / "missing.json")


def test_the_papers_arithmetic():
    """T 4096, B 64, nothing protected: K = T - B, N_v = T / 4, rounds at T + B."""
    config = EvictionConfig(budget=4096)
    assert config.plan_row(4096 + 63, 0) is None
    plan = config.plan_row(4096 + 64, 0)
    assert (plan.target, plan.keep, plan.reserve) == (4096, 4032, 1024)
    assert config.footprint() == 4160


def test_a_long_prefix_leaves_the_private_floor():
    config = EvictionConfig(budget=1024)
    assert config.private_floor == 512
    assert config.target(400) == 1024  # the floor fits into the budget
    plan = config.plan_row(3000 + 512 + 64, 3000)
    assert (plan.target, plan.keep, plan.reserve) == (3512, 512 - 64, 128)
    assert EvictionConfig(budget=100, buffer=64).private_floor == 100
    assert EvictionConfig(budget=1024, value_tokens=960).plan_row(3576, 3000).reserve == 448


configs = st.integers(1, 64).flatmap(
    lambda buffer: st.integers(buffer + 1, 600).flatmap(
        lambda budget: st.builds(
            EvictionConfig,
            budget=st.just(budget),
            buffer=st.just(buffer),
            value_tokens=st.none() | st.integers(0, budget - buffer),
            min_private=st.none() | st.integers(buffer + 1, budget),
        )
    )
)


@given(configs, st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_growing_row_stays_within_its_footprint(config, protected, private):
    """From any prompt on, a row that grows by one a step is cut to its target every ``buffer`` steps."""
    length, since, rounds = protected + private, None, 0
    for _ in range(3 * config.buffer + config.footprint(protected)):
        length += 1
        since = None if since is None else since + 1
        plan = config.plan_row(length, protected)
        if plan is None:
            assert length < config.footprint(protected)
            continue
        assert (plan.protected, plan.length) == (protected, length)
        assert plan.target == config.target(protected) == protected + plan.keep + config.buffer
        assert 0 <= plan.reserve <= plan.keep
        assert 1 <= plan.keep <= length - protected - config.buffer
        assert since in (None, config.buffer)
        length, since, rounds = plan.target, 0, rounds + 1
    assert rounds >= 3


def test_a_file_for_another_policy_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"policy": "vase-dkv", "budget": 512}')
    assert EvictionConfig.from_json(file, policy="vase-dkv").budget == 512
    with pytest.raises(ValueError, match="is for vase-dkv, --eviction says snapkv"):
        EvictionConfig.from_json(file, policy="snapkv")
