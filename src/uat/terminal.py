"""Safe output to a terminal: control characters are escaped, and characters that its encoding lacks are replaced.

Text from files, settings and errors is untrusted: it may hold an escape sequence that clears the screen, a line break
that fakes a second message, or marks that reverse the order of letters. `plain` escapes all of these. Commands print
only through `say`, `show`, `show_json` and `show_page`, inside `command`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

BROKEN_PIPE = 141
"""Exit code when the reader of the output has gone: 128 plus the number of SIGPIPE."""
INTERRUPTED = 130
"""Exit code when Ctrl-C stopped the program: 128 plus the number of SIGINT."""
LONGEST = 1000
"""Limit in characters of the sentence that ends a command, since names in it may have any length."""
SPELT = {"±": "+/-", "−": "-", "–": "-", "…": "...", "‖": "||", "Δ": "delta", "λ": "lambda", "σ": "sigma", "×": "x"}
"""Replacements for characters that an encoding lacks."""


def plain(text: Any) -> str:
    """Return untrusted text on one line, with escapes for characters that could move the cursor or reorder the line."""
    return "".join(c if c.isprintable() else _escaped(c) for c in " ".join(str(text).split("\n")))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def say(text: Any) -> None:
    """Print one line on standard error."""
    print(encodable(plain(text), sys.stderr), file=sys.stderr, flush=True)


def show(text: Any = "") -> None:
    """Print one line on standard output."""
    print(encodable(plain(text), sys.stdout))


def show_page(text: str) -> None:
    """Print several lines on standard output, such as a table."""
    for line in text.split("\n"):
        show(line)


def show_json(value: Any, *, indent: int | None = 2) -> None:
    """Print valid JSON on standard output: ASCII only, with null for NaN and infinity, which JSON lacks."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encodable(text: str, stream: Any) -> str:
    """Return the text with characters such as ± spelt out (+/-) if the stream's encoding lacks them."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "".join(SPELT.get(c, c) for c in text)
    return text


# ---------------------------------------------------------------- a command


@contextlib.contextmanager
def command(name: str, *, go_on: str = "") -> Iterator[None]:
    """Run a command: a user's mistake becomes one sentence on standard error and exit code 2.

    go_on: advice to print after Ctrl-C, which ends the command with one line and exit code 130.
    Warnings are printed as sentences as well. If the reader of the output has gone (`uat list | head -1`), the command
    ends silently.
    """
    prepare_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"{name}: warning: {message}")
            yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(BROKEN_PIPE)
    except KeyboardInterrupt:
        _flush_output()
        fail(name, f"stopped; {go_on}" if go_on else "stopped")
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        _flush_output()
        sys.exit(fail(name, str(error)))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _flush_output()
        sys.exit(fail(name, "there is not enough memory; choose a smaller model, batch or number of episodes"))


@contextlib.contextmanager
def interrupts_end_at_once(name: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once with one line.

    For imports, where a KeyboardInterrupt would print a long traceback or become an ImportError.
    """

    def end(*_: object) -> None:
        fail(name, "stopped")
        os._exit(INTERRUPTED)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def fail(name: str, sentence: str) -> int:
    """Print an error, cut to a readable length, and return the exit code."""
    short = sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST - 3]}..."
    with contextlib.suppress(BrokenPipeError):
        say(f"{name}: {short}")
    return 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch reports as a RuntimeError."""
    from_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or from_torch


def prepare_streams() -> None:
    """Make standard output and error escape characters that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush_output() -> None:
    """Write buffered output before an error is printed, if that is possible."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Discard buffered output that cannot be written, which would print an error when the interpreter exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (stream for stream in (sys.stdout, sys.stderr) if stream is not None):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # a stream without a file has nothing to write
                os.dup2(null, stream.fileno())
    os.close(null)
