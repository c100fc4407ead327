"""The verdict on an input: accepted, refused with one sentence, or broken, with the reason."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uat
from uat import cli
from uat.terminal import is_out_of_memory

OWN = str(Path(uat.__file__).parent)
LONGEST = 1500
"""Limit of a sentence in characters, including a long path."""
ERROR = re.compile(r"uat( \w+)?: (?!warning)")
"""Start of a command's last line on standard error."""


class Verdict(NamedTuple):
    kind: Literal["refused", "taken", "broken"]
    said: str = ""


class TooSlowError(BaseException):
    """Raised by the alarm of a worker; none of our code catches it."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a family."""

    what: str
    """Description of the call, for the report of a fault."""
    judge: Callable[[], Verdict]
    """Runs the call and returns the verdict."""


Check = Callable[[Any], str | None]
"""Describes what is invalid in a result; None if nothing is."""


def ask(call: Callable[[], Any], names: Sequence[str] = (), check: Check = lambda result: None) -> Verdict:
    """Call a function of the library. A refusal is an error of a documented class that mentions one of the names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except Exception as error:
            return of_error(error, names)
        said = check(result)
    return Verdict("broken", f"accepted nonsense: {said}") if said else Verdict("taken")


def of_error(error: Exception, names: Sequence[str]) -> Verdict:
    said = str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    ours = type(error) in (ValueError, TypeError) and where.filename.startswith(OWN)
    ours |= isinstance(error, ValueError) and type(error).__module__.startswith("uat.")
    ours |= isinstance(error, OSError) and error.filename is not None
    place = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {said[:300]!r}"
    if is_out_of_memory(error):
        return Verdict("broken", f"took all memory: {place}")
    if not ours:
        return Verdict("broken", f"not an error of ours: {place}")
    if (odd := odd_sentence(said)) and not isinstance(error, OSError):
        return Verdict("broken", f"{odd}: {place}")
    if names and not any(name in said for name in names):
        return Verdict("broken", f"the sentence names none of {', '.join(names)}: {place}")
    return Verdict("refused", said)


def odd_sentence(said: str) -> str | None:
    """Explain why a text is not one readable sentence; None if it is."""
    if not said.strip():
        return "an error without words"
    if "\n" in said.strip():
        return "an error of several lines"
    return f"an error of {len(said)} characters" if len(said) > LONGEST else None


# ---------------------------------------------------------------- commands


class Said(NamedTuple):
    code: Any
    out: str
    err: str
    trace: str


def run_command(argv: Sequence[str]) -> Said:
    """Run the command line inside this process."""
    code, trace = 0, ""
    with _streams() as (out, err):
        try:
            cli.main(list(argv))
        except SystemExit as stop:
            code = stop.code or 0
        except Exception:
            code, trace = 1, traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        said = [stream.getvalue().decode("utf-8", "replace") for stream in (out, err)]
    return Said(code, said[0], said[1], trace)


@contextlib.contextmanager
def _streams() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Standard output and error as in a shell: bytes of an encoding."""
    out, err = io.BytesIO(), io.BytesIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (io.TextIOWrapper(stream, encoding="utf-8") for stream in (out, err))
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = before


def ask_command(argv: Sequence[str], check: Callable[[Said], str | None] = lambda said: None) -> Verdict:
    """Run a command: it exits with 0, or with 2 and one line that says why."""
    said = run_command(argv)
    if said.trace:
        frames = [line.strip() for line in said.trace.strip().splitlines()]
        place = next((line for line in reversed(frames) if line.startswith("File") and "/uat/" in line), frames[0])
        return Verdict("broken", f"a traceback: {frames[-1][:300]} ({place})")
    lines = [line for line in said.err.splitlines() if line.strip()]
    if odd := next((c for c in said.out + said.err if not c.isprintable() and c != "\n"), None):
        return Verdict("broken", f"wrote the control character {odd!r}: {said.err[-300:]!r}")
    if said.code == 2:
        errors = [line for line in lines if ERROR.match(line)]
        if len(errors) != 1 or lines[-1] != errors[0]:
            return Verdict("broken", f"expected one line of error, got {said.err[-400:]!r}")
        if "there is not enough memory" in errors[0]:
            return Verdict("broken", f"took all memory: {errors[0]}")
        odd = odd_sentence(errors[0])
        return Verdict("broken", odd) if odd else Verdict("refused", errors[0])
    if said.code != 0:
        return Verdict("broken", f"exit code {said.code}: {said.err[-300:]!r}")
    if any(ERROR.match(line) for line in lines):
        return Verdict("broken", f"exit code 0 after an error: {said.err[-300:]!r}")
    nonsense = check(said)
    return Verdict("broken", f"accepted nonsense: {nonsense}") if nonsense else Verdict("taken")


def first_odd_number(values: dict[str, Any]) -> str | None:
    """The first of these numbers that is NaN, infinite or not a number at all."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} is {value!r:.60}"
    return None
