"""Policies are found by name; a new one is a new file."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
import sgl_vase_kernels

import sgl_vase
from sgl_vase import EvictionConfig, Policy, policies, policy_class, policy_names, registry

NAMES = {
    "vase-attnv",
    "vase-dkv",
    "snapkv",
    "curdkv",
    "r-kv",
    "random",
    "streaming",
    "keydiff",
    "knorm",
    "value-range",
    "evict-large-range",
    "h2o",
}

PLUG_IN = '''
"""A policy of somebody else."""
from sgl_vase.policies.streaming import Streaming


class Newest(Streaming):
    """Nothing new."""

    name = "{name}"
    aliases = {aliases}
'''


def test_names():
    assert {policy_class(name).name for name in policy_names()} == NAMES
    assert set(policy_names()) == NAMES | {"vase"}
    assert policy_class("vase") is policy_class("vase-attnv")
    assert EvictionConfig().policy == "vase-attnv"
    with pytest.raises(ValueError, match=r"--eviction must be one of none, .*snapkv.*, got 'Vase'"):
        policy_class("Vase")


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Writes a module into the package of policies."""
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    registry._classes.cache_clear()

    def write(module: str, name: str, aliases: tuple[str, ...] = ()) -> None:
        (tmp_path / f"{module}.py").write_text(PLUG_IN.format(name=name, aliases=aliases))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, f"sgl_vase.policies.{module}", raising=False)

    yield write
    registry._classes.cache_clear()


def test_a_new_file_is_a_new_policy(plug_in):
    plug_in("newest", "newest", ("last",))
    assert EvictionConfig("last").policy == "newest"
    assert issubclass(policy_class("newest"), Policy)
    assert set(policy_names()) == NAMES | {"vase", "newest", "last"}


def test_two_policies_of_one_name_are_refused(plug_in):
    plug_in("mine", "own", ("vase",))
    with pytest.raises(RuntimeError, match="two policies are called 'vase'"):
        policy_names()


def test_no_serving_engine_is_imported():
    code = (
        "import sys, sgl_vase; sgl_vase.policy_names(); "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'sglang', 'triton', 'transformers', 'sgl_vase_srt'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_things_have_docstrings():
    missing = []
    for package in (sgl_vase, sgl_vase_kernels):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "triton" in info.name or info.name.endswith("torch_ops"):  # ``ops`` documents both
                continue
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if getattr(value, "__module__", None) != module.__name__ or name.startswith("_"):
                    continue
                doc = value.__doc__ or ""
                if not doc or doc.startswith(f"{name}("):  # what a dataclass writes itself
                    missing.append(f"{info.name}.{name}")
    assert not missing
