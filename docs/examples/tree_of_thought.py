"""Tree of thought as an SGLang program: branches share a prefix, think at length, are judged; the best goes on.

    python -m sglang.launch_server --model-path MODEL --eviction vase --eviction-budget 256
    python docs/examples/tree_of_thought.py --url http://127.0.0.1:30000

The program knows nothing of eviction. A branch thinks for a few hundred tokens, so that a small budget makes its row
evict; the prefix that all branches share belongs to the radix tree and is never evicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from urllib.error import URLError

import sglang as sgl

QUESTION = """\
A flood has taken the only bridge of a town of four thousand people. The hospital, the secondary school and most of \
the workplaces are on the far bank. Until the flood a bus crossed every twenty minutes. The next bridge is forty \
kilometres upstream, on a narrow road. The river is ninety metres wide and slow in summer, but it rises by three \
metres within a day when the snow melts. The town owns two small ferries and has money for one more year without \
new taxes. How should people cross from next month on?"""
APPROACHES = ("Cheapest first", "Fastest first", "With the neighbours")
"""How each branch begins. Different first words: up to there, and no further, their prompts are the same."""


@sgl.function
def tree_of_thought(s: Any, question: str, approaches: Sequence[str], tokens: int, keep: int = 0) -> dict[str, Any]:
    """Think ``tokens`` tokens on each approach, judge every branch, answer from the best one.

    Judgement and answer read the whole thoughts, or with ``keep`` only their last ``keep`` words: what an evicted
    branch thought is not in the radix tree, so reading it again means prefilling it again.

    The value has one item a branch in ``records`` (what the server says it evicted; ``None`` where it does not
    evict) and ``scores`` (log-probability of "yes" less that of "no"), the index of the ``best`` branch and its
    ``answer``.
    """
    s += sgl.system("You are a careful planner. You think before you answer.")
    s += sgl.user(f"{question} Follow one approach to its end, with all steps, costs and risks.")
    s += sgl.assistant_begin()
    thinking = s.fork(len(approaches))
    for approach, branch in zip(approaches, thinking, strict=True):
        think(branch, approach, tokens)
    branches = s.fork(len(approaches)) if keep else thinking
    for approach, branch, thought in zip(approaches, branches, thinking, strict=True):
        judge(branch, f"{approach}, in short: {' '.join(thought['thoughts'].split()[-keep:])}" if keep else "")
    scores = []
    for branch in branches:
        yes, no = branch.get_meta_info("verdict")["normalized_prompt_logprobs"]
        scores.append(yes - no)
    best = max(range(len(scores)), key=scores.__getitem__)
    branches[best] += sgl.user("Sum the plan up in a few sentences.")
    branches[best] += sgl.assistant(sgl.gen("answer", max_tokens=max(tokens // 4, 1)))
    return {
        "records": [branch.get_meta_info("thoughts").get("eviction") for branch in thinking],
        "scores": scores,
        "best": best,
        "answer": branches[best]["answer"],
    }


def think(s: Any, approach: str, tokens: int) -> None:
    s += f"{approach}:" + sgl.gen("thoughts", max_tokens=tokens, min_tokens=tokens)


def judge(s: Any, thoughts: str) -> None:
    s += thoughts
    s += sgl.assistant_end()
    s += sgl.user("Will this plan work? Say yes or no.")
    s += sgl.assistant(sgl.select("verdict", ["yes", "no"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=320, help="tokens that each branch thinks")
    parser.add_argument("--keep", type=int, default=0, help="judge by the last KEEP words of a branch; 0: by all")
    parser.add_argument("--chat-template", default="chatml", help="a name known to SGLang's frontend")
    args = parser.parse_args(argv)
    try:
        backend = sgl.RuntimeEndpoint(args.url, chat_template_name=args.chat_template)
    except URLError as error:
        print(f"error: no SGLang server answers at --url {args.url}: {error.reason}", file=sys.stderr)
        return 1
    found = tree_of_thought.run(
        question=args.question,
        approaches=APPROACHES,
        tokens=args.tokens,
        keep=args.keep,
        temperature=0,
        backend=backend,
    ).ret_value
    for approach, record, score in zip(APPROACHES, found["records"], found["scores"], strict=True):
        kept = f"held {record['kv_tokens']} KV tokens, {record['evictions']} evictions" if record else "no eviction"
        print(f"{approach}: {kept}; yes - no {score:+.2f}")
    print(f"\n{APPROACHES[found['best']]}: {found['answer'].strip()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
