"""Straight-line programs worked out step by step: every step needs a value that was *generated* at an earlier step.

A program gives values to a few inputs and then defines one variable a line by a function of one earlier variable:

    program v7 4 v8 1 v9 6 v10 0 ; v11 g v8 v12 f v11 ... ? v31 v12 :

The model answers with one ten-token step a line, then the values of the variables asked for:

    v11 g v8 v8 1 g 1 4 v11 4 v12 f v11 v11 4 f 4 7 v12 7 ... ? v31 9 v12 7 <eos>

A step restates its line (copied from the prompt), recalls the operand's value (from the step that computed it, or from
the inputs), works out the function and ends with the variable and its value. The functions are permutations of the ten
digits, so a wrong value stays wrong in everything computed from it. Text is tokens separated by spaces; every token is
one vocabulary entry.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

NAMES = 160
INPUTS = 4
MAX_LINES = 128
STEP = 10  # tokens of one step of the chain
# The functions: a value v becomes (factor * v + offset) mod 10; factors coprime to 10 make each a permutation.
FUNCTIONS = {"f": (1, 3), "g": (3, 1), "h": (7, 2), "k": (9, 5)}
BEGIN, BODY, ASK, SOLVE, PAD, EOS = "program", ";", "?", ":", "<pad>", "<eos>"
DIGITS = [str(digit) for digit in range(10)]
VARIABLES = [f"v{index}" for index in range(NAMES)]
VOCABULARY = [PAD, EOS, BEGIN, BODY, ASK, SOLVE, *DIGITS, *FUNCTIONS, *VARIABLES]

Split = Literal["train", "test"]
Kind = Literal["lookup", "result", "format"]


@dataclass(frozen=True)
class Problem:
    """One program. ``prompt`` + " " + ``chain`` is the whole trace; ``answer`` is the chain's end from ``?`` on."""

    prompt: str
    chain: str
    answer: str


def apply(function: str, value: int) -> int:
    """The value of ``function`` (a key of ``FUNCTIONS``) at a digit."""
    factor, offset = FUNCTIONS[function]
    return (factor * value + offset) % 10


def split_of(prompt: str) -> Split:
    """The split that a program belongs to, by a hash of its text: about one in eight is a test program."""
    return "test" if hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0 else "train"


def draw(rng: random.Random, lines: int, queries: int, spread: float) -> Problem:
    """One random program of either split.

    ``lines`` definitions (1 to ``MAX_LINES``); the answer has ``queries`` values (at most ``lines``). An operand is an
    earlier variable with probability proportional to a weight that is drawn once for each variable from a Pareto law
    with exponent 1 / ``spread``: 0 makes all earlier variables equally likely, 1 makes a few of them popular.
    """
    if not 1 <= queries <= lines <= MAX_LINES:
        raise ValueError(f"need 1 <= queries <= lines <= {MAX_LINES}, got queries={queries}, lines={lines}")
    first = rng.randrange(NAMES)
    names = [VARIABLES[(first + index) % NAMES] for index in range(INPUTS + lines)]
    values = [rng.randrange(10) for _ in range(INPUTS)]
    weights = [(1 - rng.random()) ** -spread for _ in names]
    prompt = [BEGIN, *(token for name, value in zip(names, values, strict=False) for token in (name, str(value))), BODY]
    chain = []
    for index in range(INPUTS, INPUTS + lines):
        function = rng.choice(list(FUNCTIONS))
        operand = rng.choices(range(index), weights[:index])[0]
        line, before = [names[index], function, names[operand]], str(values[operand])
        values.append(apply(function, values[operand]))
        after = str(values[index])
        prompt += line
        chain += [*line, names[operand], before, function, before, after, names[index], after]
    asked = rng.sample(range(INPUTS, INPUTS + lines), queries)
    prompt += [ASK, *(names[index] for index in asked), SOLVE]
    answer = " ".join([ASK, *(token for index in asked for token in (names[index], str(values[index])))])
    return Problem(" ".join(prompt), " ".join([*chain, answer, EOS]), answer)


def problems(split: Split, n: int, seed: int, lines: int, queries: int = 4, spread: float = 0.5) -> list[Problem]:
    """The first ``n`` problems of a split: ``INPUTS`` inputs, ``lines`` steps, ``queries`` values asked for.

    The same for the same arguments, and a longer list begins with the shorter one; ``spread`` is that of ``draw``.
    """
    rng = random.Random(f"{split} {seed} {lines} {queries} {spread}")
    found: list[Problem] = []
    while len(found) < n:
        problem = draw(rng, lines, queries, spread)
        found += [problem] if split_of(problem.prompt) == split else []
    return found


def kinds() -> list[Kind]:
    """The kind of each token of a step: what it recalls, what it works out, and what it copies or repeats."""
    return [*["format"] * 4, "lookup", "format", "format", "result", "format", "format"]


def answer_of(text: str) -> list[str]:
    """The last ``?`` of ``text`` and all tokens after it; none where there is no ``?``."""
    tokens = [token for token in text.split() if token not in (EOS, PAD)]
    return tokens[max((index for index, token in enumerate(tokens) if token == ASK), default=len(tokens)) :]


def grade(problem: Problem, text: str) -> bool:
    """Whether the generated ``text`` ends with the right answer: whatever follows its last ``?``, and nothing else."""
    return answer_of(text) == problem.answer.split()


def values_right(problem: Problem, text: str) -> float:
    """Share of the values asked for that the answer at the end of ``text`` has right, each in its place."""
    expected, found = problem.answer.split(), answer_of(text)
    pairs = list(zip(expected[1::2], expected[2::2], strict=True))
    return sum(a == b for a, b in zip(pairs, zip(found[1::2], found[2::2], strict=False), strict=False)) / len(pairs)


def first_error(problem: Problem, text: str) -> Kind | None:
    """The kind of the first token where ``text`` leaves the reference chain, or ``None`` where it never does.

    A value of the final answer counts as a look-up. A text that ends early is a format error.
    """
    expected = [token for token in problem.chain.split() if token != EOS]
    found = [token for token in text.split() if token not in (EOS, PAD)]
    steps = len(expected) - len(problem.answer.split())
    for index, token in enumerate(expected):
        if index >= len(found) or found[index] != token:
            if index >= len(found) or token not in DIGITS:
                return "format"
            return kinds()[index % STEP] if index < steps else "lookup"
    return None if len(found) == len(expected) else "format"
