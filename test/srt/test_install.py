"""The hook table against the installed SGLang, in processes of their own: hooks cannot be taken back."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_off_hooks_nothing_but_the_flags() -> None:
    out = run(
        """
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry
        import sglang.srt.managers.scheduler
        load_plugins()
        ours = {t for t, hooks in HookRegistry._hooks.items() for _, _, s in hooks if s and s.dist_name == "sgl-vase"}
        print(sorted(ours))
        """
    )
    assert out.splitlines()[-1] == str(
        ["sglang.srt.entrypoints.engine.Engine.server_args_class", "sglang.srt.server_args.ServerArgs"]
    )


@pytest.mark.parametrize("policy", ["vase-attnv", "vase-dkv"])
def test_every_hook_is_found_on_its_live_target(policy: str) -> None:
    out = run(
        f"""
        from sgl_vase import EvictionConfig
        from sgl_vase_srt import install
        from sgl_vase_srt.engine import current
        current.config = EvictionConfig(policy={policy!r})
        import sglang.srt.entrypoints.engine
        from sglang.srt.plugins import load_plugins
        load_plugins()
        install.verify(install._scheduler_hooks())
        install.verify(install.FRONTEND)
        from sglang.srt.plugins.hook_registry import HookRegistry
        print(any(target.endswith("AttentionBackend.forward") for target in HookRegistry._hooks))
        """
    )
    # Queries are captured for the policy that asks for them, and for no other.
    assert out.splitlines()[-1] == str(policy == "vase-attnv")


@pytest.mark.parametrize(
    "sabotage",
    [
        "from sglang.srt.managers.schedule_batch import Req; Req.reset_for_retract = Req.reset_for_retract.__wrapped__",
        "import sglang.srt.managers.scheduler as s; s.release_kv_cache = s.release_kv_cache.__wrapped__",
    ],
)
def test_a_missing_hook_is_noticed(sabotage: str) -> None:
    out = run(
        f"""
        from sgl_vase import EvictionConfig
        from sgl_vase_srt import install
        from sgl_vase_srt.engine import current
        current.config = EvictionConfig()
        import sglang.srt.managers.scheduler
        from sglang.srt.plugins import load_plugins
        load_plugins()
        {sabotage}
        try:
            install.verify(install._scheduler_hooks())
        except ValueError as error:
            print(error)
        """
    )
    assert out.splitlines()[-1].startswith("--eviction cannot serve: ")


def test_a_launcher_without_its_hooks_ends_in_one_sentence() -> None:
    out = run(
        """
        import contextlib, io
        import sglang.srt.entrypoints.engine
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sgl_vase_srt.flags import VaseServerArgs
        HookRegistry.apply_hooks = lambda: None
        for _ in range(2):
            record = VaseServerArgs(
                model_path="dummy", device="cpu", attention_backend="torch_native", eviction="vase"
            )
            record._from_command_line = True
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    record.resolve_once()
            except SystemExit as stop:
                print(stop.code, said.getvalue().splitlines()[-1])
        """
    )
    refused = [line for line in out.splitlines() if line.startswith("2 error: --eviction cannot serve: the hook on ")]
    assert len(refused) == 2, "a second attempt in the process looks again"


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_vase_srt import install

    monkeypatch.setattr(install, "version", lambda name: "0.5.24")
    with pytest.raises(ValueError, match=r"needs sglang==0\.5\.23 .* found 0\.5\.24: pip install sglang==0\.5\.23"):
        install.check_sglang_version()


def test_a_scheduler_without_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_vase_srt.engine import current
    from sgl_vase_srt.hooks import ready

    from sgl_vase import EvictionConfig

    monkeypatch.setattr(current, "config", EvictionConfig())
    ready.require([{"eviction_ready": "vase-attnv"}])
    with pytest.raises(RuntimeError, match="runs without the sgl_vase plugin"):
        ready.require([{"eviction_ready": "vase-attnv"}, {"status": "ready"}])


def test_every_hook_says_why_it_is_there() -> None:
    from sgl_vase_srt import install

    hooks = (*install.SCHEDULER, *install.QUERIES, *install.CONTROLLER, *install.FRONTEND)
    assert [hook.target for hook in hooks if not hook.call.__doc__] == []
