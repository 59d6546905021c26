"""The ways to serve that the benchmarks compare."""

from dataclasses import dataclass, field

from benchmark.serving.server import STOCK


@dataclass(frozen=True)
class Variant:
    """One way to serve: flags and environment, and client arguments if not the scenario's."""

    name: str
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    client: tuple[str, ...] = ()


def evicting(policy: str, budget: int, name: str = "", flags: tuple[str, ...] = ()) -> Variant:
    return Variant(name or policy, ("--eviction", policy, "--eviction-budget", str(budget), *flags))


PRODUCTION = Variant("stock", env=STOCK)
"""Production flags, which are those of our evicting servers as well: the baselines of both kinds are one."""
PORTS = Variant("stock without radix cache and overlap", ("--disable-radix-cache", "--disable-overlap-schedule"), STOCK)
"""The flags that other evicting ports of SGLang need."""
BASELINES = (PRODUCTION, PORTS)
IDEAL = "ideal"
OFF = Variant("eviction off")
