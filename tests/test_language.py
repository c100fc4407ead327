"""Docstrings, comments, messages and documents avoid phrasings that make readers stumble.

The rules catch only the most common slips of this project. To cover more of it, revise a room and add it to ROOMS.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = (
    "src/uat/adapters",
    "src/uat/data",
    "src/uat/domains",
    "src/uat/evaluation",
    "src/uat/paper",
    "src/uat/bench",
    "src/uat/nn",
    "src/uat/methods",
    *(f"src/uat/{name}.py" for name in ("files", "archives", "tensor_files", "lock", "memory", "threads", "rows")),
    *(f"src/uat/{name}.py" for name in ("contracts", "distributions", "spec", "episode", "clock")),
    *(f"src/uat/{name}.py" for name in ("acting", "logs", "checks", "feedback", "noise")),
    *(f"src/uat/{name}.py" for name in ("config", "recipes", "runs", "manifest", "registry", "numerics")),
    *(f"src/uat/{name}.py" for name in ("cli", "__init__", "__main__")),
    *(f"src/uat/{name}.py" for name in ("terminal", "metrics", "flags", "settings")),
    "src/uat/engines",
    "src/uat/training",
    "src/uat/serving",
    "tests/adapters",
    "tests/engines",
    "tests/training",
    "tests/serving",
    "tests/contracts",
    "tests/data",
    "tests/domains",
    "tests/evaluation",
    "tests/paper",
    "tests/bench",
    "tests/nn",
    "tests/methods",
    "tests/robustness",
    *(f"tests/test_{name}.py" for name in ("lock", "terminal", "results", "feedback", "config", "cli", "registry")),
    *(
        f"tests/test_{name}.py"
        for name in ("runs", "clock", "acting", "contracts", "renamed", "mistakes", "api", "noise")
    ),
    *(f"tests/test_{name}.py" for name in ("plugins", "one_clock", "logs", "spaces", "laws")),
    *(f"tests/test_{name}.py" for name in ("documents", "layers", "readme", "sizes")),
    *(f"tests/{name}" for name in ("golden", "learning", "builders.py", "conftest.py", "reference.py")),
    "results",
    "docs",
    "benchmarks",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
"""Files and folders whose text has been revised."""

INSTEAD = {
    r"told": "sees, receives, is given, reports",
    r"said": "states, reports; or name the value",
    r"whoever": "the reader, the caller, the policy, ...",
    r"who (?:is|are|was|does|sees|knows|has) (?:not )?": "methods that ..., users who ...",
    r"(?:which|that|what|it) (?:is|are) no (?!longer|more)": "is not a, are not",
    r"is none for": "does not support",
    r"worked out": "computed",
    r"mend(?:ed|ing|s)?": "fix",
    r"anew": "again",
    r"askew": "unaligned",
    r"of now": "current",
    r"if it may": "if supported",
    r"makes much of": "amplifies",
    r"(?:is|are) sure to": "the 95 % interval is",
    r"held against": "compared with",
    r"hangs? on": "depends on",
    r"beforehand": "in advance",
    r"adds? up in": "the order of sums",
    r"goes? on where": "resumes",
    r"as (?:many|much) as there (?:is|are)": "all",
    r"than there (?:is|are)": "than available",
    r"lies? there": "exists",
    r"ask(?:s|ed)? (?:it|them) (?:what|the)": "test, check",
    r"prove it": "Tests",
    r"less (?:its|the|those|what)": "minus",
    r"look at(?:s|ed)?(?: it)? beforehand": "check",
    r"the same of": "repeat the noun",
    r"what a call did": "the result of a call",
    r"somebody(?: else)?": "a user, another process, a foreign ...",
    r"nobody": "no process, no method, no user",
    r"so (?:many|much) (?!as|that|to)": "this number of; or give the number",
    r"now and then": "sometimes",
    r"at one time": "at a time",
    r"came of": "the result of",
    r"for want of": "for lack of",
    r"bears? any": "tolerates",
    r"how sure": "the interval of",
    r"as often as (?:they|it) sa(?:y|ys)": "the stated coverage",
    r"are none": "are missing, are invalid",
    r"what (?:is|are) left": "the rest, the remaining ...",
    r"what (?:it|they) holds?": "its contents",
    r"brings? along": "supplies",
    r"close at hand": "available",
    r"by (?:whom|whose)": "name the actor",
    r"it is (?:there|here) (?:already|now)": "exists",
    r"take(?:s|n)? (?:it|them|over) whole": "replace",
    r"half of a letter": "a lone surrogate",
    r"all of it or nothing": "atomically",
}
"""Phrase -> what to write instead. Phrases match whole words and ignore case."""
RIDDLES = r"(?:What|Who|Whose|Of|And|But|Also|Where|The same|As (?:many|much|large))"
"""First words of a docstring that does not name its subject."""

PHRASES = {re.compile(rf"(?<![\w/.`-]){phrase}(?![\w`])", re.IGNORECASE): hint for phrase, hint in INSTEAD.items()}
START = re.compile(rf"{RIDDLES}\b")


def files(room: str) -> list[Path]:
    path = ROOT / room
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md") and "__pycache__" not in file.parts)


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts: comments and strings of several words, or a document without its code."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        blocks = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
        plain = blocks.sub(lambda block: "\n" * block[0].count("\n"), source)
        yield from enumerate(re.sub(r"`[^`\n]*`", "``", plain).splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        text = re.sub(r"\{[^{}]*\}", "{}", token.string) if re.match("[rR]?[fF]", token.string) else token.string
        if name == "COMMENT" or (name in ("STRING", "FSTRING_MIDDLE") and " " in text.strip("\"' ")):
            for offset, line in enumerate(text.splitlines()):
                yield token.start[0] + offset, re.sub(r"`[^`]*`", "``", line)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of docstrings, including those under fields and constants."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for part in node.body:
                match part:
                    case ast.Expr(ast.Constant(str(text))):
                        yield part.lineno, text


def slips(file: Path) -> list[str]:
    """Everything in a file that the rules reject, one sentence each."""
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    result = [
        f"{place}:{number}: write something like {hint!r} instead of {match[0]!r}"
        for number, text in prose(file)
        for phrase, hint in PHRASES.items()
        if (match := phrase.search(text))
    ]
    if file.suffix == ".py":
        result += [
            f"{place}:{number}: start the docstring with a verb or the thing, not with {match[0]!r}"
            for number, text in docstrings(file)
            if (match := START.match(text))
        ]
    return result


@pytest.mark.parametrize("room", ROOMS)
def test_revised_rooms_stay_plain(room: str) -> None:
    texts = files(room)
    assert texts, f"{room} holds no text"
    found = [slip for file in texts for slip in slips(file)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "slip"),
    [
        ("a.py", '"""What a policy is told of."""\n', "told"),
        ("a.py", '"""What a policy sees."""\n', "start the docstring"),
        ("a.py", "x = 1  # mended\n", "fix"),
        ("a.py", 'raise ValueError(f"{x} is worked out again")\n', "computed"),
        ("a.md", "Numbers are worked out here.\n", "computed"),
        ("a.py", 'class A:\n    x: int = 1\n    """Of a layer."""\n', "start the docstring"),
    ],
)
def test_slips_are_reported(tmp_path: Path, name: str, text: str, slip: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert slip in " ".join(slips(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Return the rows of `told`."""\ntold = {"told": 1}\n'),
        ("a.md", "The field `told_LTT` and a block:\n\n```\ntold anew\n```\n"),
    ],
)
def test_code_is_not_prose(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert slips(tmp_path / name) == []
