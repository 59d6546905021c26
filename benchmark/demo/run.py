"""``python -m benchmark.demo``: one long streamed answer from a server that evicts, and what it held of it.

Builds the demo model if needed, starts a server, sends one chat request over HTTP and tears the server down.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from benchmark.demo.model import DemoModelError, build
from benchmark.serving.server import Server, ServerError

PROMPT = "Explain how the sea, the wind and the moon shape a coastline, step by step, with many examples."


class DemoError(RuntimeError):
    """The demo cannot show what it promises; the message says why."""


def stream_chat(url: str, prompt: str, tokens: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of one chat completion of exactly ``tokens`` tokens, usage last."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.7,
        "top_p": 0.95,
        "presence_penalty": 1.0,  # a model this small repeats itself otherwise, with or without eviction
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with requests.post(f"{url}/v1/chat/completions", json=body, stream=True, timeout=600) as response:
        if response.status_code != 200:
            raise DemoError(f"the server answered {response.status_code}: {response.text[:500]}")
        for line in response.iter_lines():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                return
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise DemoError(f"the server reported: {event['error']}")
            yield event
    raise DemoError("the stream broke off before its end")


def summary(usage: dict[str, Any] | None, tokens: int) -> str:
    """The closing line, e.g. ``held 320 of 1,731 KV tokens, 23 evictions``, from the answer's own usage block.

    Raises ``DemoError`` unless all ``tokens`` were generated and the answer says that eviction ran.
    """
    if usage is None:
        raise DemoError("the answer ended without a usage block")
    if usage["completion_tokens"] != tokens:
        raise DemoError(f"asked for {tokens} tokens, got {usage['completion_tokens']}")
    record = usage.get("eviction")
    if record is None:
        raise DemoError("the usage block has no 'eviction' record: this server runs without eviction")
    if not record["evictions"]:
        raise DemoError(f"nothing was evicted: {record}")
    return f"held {record['kv_tokens']:,} of {usage['total_tokens']:,} KV tokens, {record['evictions']} evictions"


def _report_wait(seconds: float, last: list[float]) -> None:
    if seconds - last[0] >= 10:
        last[0] = seconds
        print(f"  still starting, {seconds:.0f} s", flush=True)


def run(model: Path, flags: list[str], tokens: int, seed: int) -> str:
    """Serve ``model``, print the answer as it streams, return the closing line."""
    print("Starting: python -m sglang.launch_server --model-path", model, *flags, flush=True)
    print("  SGLang imports a lot; half a minute is normal on an idle machine", flush=True)
    last = [0.0]
    with Server(model, flags).start(on_wait=lambda seconds: _report_wait(seconds, last)) as server:
        print(f"\n> {PROMPT}\n", flush=True)
        begin, usage = time.monotonic(), None
        for event in stream_chat(server.url, PROMPT, tokens, seed):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        seconds = time.monotonic() - begin
    print(f"\n\n{tokens:,} tokens in {seconds:.0f} s", flush=True)
    return summary(usage, tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="built there if absent")
    parser.add_argument("--tokens", type=int, default=1700, help="length of the answer (default: 1700)")
    parser.add_argument("--policy", default="vase", help="what --eviction gets (default: vase)")
    parser.add_argument("--budget", type=int, default=256, help="KV tokens a request keeps (default: 256)")
    parser.add_argument("--seed", type=int, default=1, help="sampling seed of the request (default: 1)")
    options, extra = parser.parse_known_args(argv)
    flags = ["--eviction", options.policy, "--eviction-budget", str(options.budget), "--max-total-tokens", "8192"]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the server goes too
    try:
        if not (options.model / "config.json").is_file() or (options.model / "demo_model.json").is_file():
            print(f"Demo model in {options.model}:", "built" if build(options.model) else "there, verified", flush=True)
        print(run(options.model, [*flags, *extra], options.tokens, options.seed))
    except (DemoError, DemoModelError, ServerError, requests.RequestException) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
