"""The ``--eviction*`` flags: a subclass of SGLang's ``ServerArgs`` that carries and checks them."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import msgspec
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.server_args import ServerArgs

from sgl_vase import EvictionConfig, policy_names
from sgl_vase.config import PREFILL_MODES, PREFIX_MODES
from sgl_vase_srt import compat, install
from sgl_vase_srt.engine import current


class VaseServerArgs(ServerArgs, dict=True):  # type: ignore[call-arg]  # msgspec takes it
    eviction: A[
        str,
        Arg(
            help="KV-cache eviction policy: what stays when a request outgrows --eviction-budget. "
            "vase (= vase-attnv): large value ranges stay, the rest is drawn by attention; none: keep everything.",
            choices=["none", *policy_names()],
        ),
    ] = "none"
    eviction_budget: A[
        int | None, Arg(help="T: KV tokens a request keeps after an eviction round, buffer included (default 4096).")
    ] = None
    eviction_buffer: A[
        int | None, Arg(help="B: newest tokens always kept = decode steps between rounds = query window (default 64).")
    ] = None
    eviction_value_tokens: A[
        int | None, Arg(help="N_v: tokens reserved for the largest value ranges (default: a quarter of T - P).")
    ] = None
    eviction_min_private: A[
        int | None,
        Arg(help="M: private tokens kept beside a protected prefix, however long (default: half of T, at least 2 B)."),
    ] = None
    eviction_prefix: A[
        str | None,
        Arg(
            help="protect (default): what the radix tree shares is never evicted; detach: a request that outgrows its "
            "budget copies what it keeps and lets go of the shared part, the prompt included.",
            choices=list(PREFIX_MODES),
        ),
    ] = None
    eviction_prefill: A[
        str | None,
        Arg(
            help="off (default): a prompt joins the radix tree whole; on: only its first T - M tokens do, and the rest "
            "of a long prompt is compacted right after its prefill.",
            choices=list(PREFILL_MODES),
        ),
    ] = None
    eviction_seed: A[int | None, Arg(help="Seed of the random draws of all requests (default 0).")] = None
    eviction_config: A[
        str | None, Arg(help="JSON file with any of these settings and the policy's own options; explicit flags win.")
    ] = None

    def eviction_settings(self) -> EvictionConfig | None:
        """The checked configuration, ``None`` when eviction is off. Raises ``ValueError`` naming the flag."""
        flags = {
            name: getattr(self, f"eviction_{name}")
            for name in ("budget", "buffer", "value_tokens", "min_private", "prefix", "prefill", "seed")
        }
        if self.eviction == "none":
            given = [f"--eviction-{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
            if self.eviction_config is not None:
                given.append("--eviction-config")
            if given:
                raise ValueError(f"{', '.join(given)} has no effect without --eviction: add --eviction vase")
            return None
        if self.eviction_config is not None:
            return EvictionConfig.from_json(self.eviction_config, policy=self.eviction, **flags)
        return EvictionConfig(policy=self.eviction, **{k: v for k, v in flags.items() if v is not None})

    @classmethod
    def from_cli_args(cls, args: Any) -> VaseServerArgs:
        record: VaseServerArgs = super().from_cli_args(args)
        record._from_command_line = True
        try:
            record.eviction_settings()
        except ValueError as error:
            record._refuse(error)
        return record

    def resolve_once(self) -> None:
        if getattr(self, "_resolution_finished", False):
            return
        super().resolve_once()
        try:
            config = self.eviction_settings()
            if config is None:
                return
            install.check_sglang_version()
            compat.check_environment()
            view = resolving_view(self)
            compat.check_server_args(view)
            if str(view.model_path).lower() not in ("none", "dummy"):
                compat.check_model(model_config_of(self))
            current.config = config
            install.install_frontend()
        except ValueError as error:
            self._refuse(error)

    def resolved_dict(self) -> dict[str, Any]:
        resolved = super().resolved_dict()
        if (config := self.eviction_settings()) is not None:
            values = config.resolved()
            resolved["eviction"] = values.pop("policy")
            resolved.update({f"eviction_{name}": value for name, value in values.items()})
        return resolved

    def _refuse(self, error: ValueError) -> NoReturn:
        """One sentence and a non-zero exit on the command line, an exception for ``Engine(...)``."""
        if getattr(self, "_from_command_line", False):
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        raise error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), msgspec.structs.asdict(self), dict(self.__dict__))


def _rebuild(cls: type[VaseServerArgs], fields: dict[str, Any], bookkeeping: dict[str, Any]) -> VaseServerArgs:
    """Unpickle in a child process. A scheduler loads plugins right after, which follow
    ``current.config``; a tokenizer worker has loaded them by now."""
    record = cls(**fields)
    record.__dict__.update(bookkeeping)
    if (config := record.eviction_settings()) is not None:
        current.config = config
        if "sglang.srt.managers.tokenizer_manager" in sys.modules:
            install.install_frontend()
    return record
