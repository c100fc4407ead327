"""What reaches a terminal: control characters become escapes, and letters that its encoding lacks are replaced.

Text of files, settings and errors may hold anything: an escape sequence that clears the screen, a line break that fakes
a second message, marks that reverse the order of letters. `plain` shows all of these as escapes. The commands print
through `say`, `show`, `show_json` and `show_page` alone, inside `command`.
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
"""Exit code of a program whose reader has gone: 128 and the number of SIGPIPE."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C stopped: 128 and the number of SIGINT."""
LONGEST = 1000
"""Letters of a sentence that ends a command; names in it may be of any length."""
SPELT = {"±": "+/-", "−": "-", "–": "-", "…": "...", "‖": "||", "Δ": "delta", "λ": "lambda", "σ": "sigma", "×": "x"}
"""What stands for letters of ours where an encoding lacks them."""


def plain(text: Any) -> str:
    """Text of a file or an error on one line; what could move the cursor or reorder the line is shown as an escape."""
    return "".join(c if c.isprintable() else _escaped(c) for c in " ".join(str(text).split("\n")))


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def say(text: Any) -> None:
    """One line on standard error."""
    print(encodable(plain(text), sys.stderr), file=sys.stderr, flush=True)


def show(text: Any = "") -> None:
    """One line on standard output."""
    print(encodable(plain(text), sys.stdout))


def show_page(text: str) -> None:
    """Several lines on standard output, such as a table."""
    for line in text.split("\n"):
        show(line)


def show_json(value: Any, *, indent: int | None = 2) -> None:
    """Valid JSON on standard output: ASCII, and null for NaN and infinity, which JSON does not have."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encodable(text: str, stream: Any) -> str:
    """The text with letters of ours spelt out, such as ± as +/-, if the stream cannot show them."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "".join(SPELT.get(c, c) for c in text)
    return text


# ---------------------------------------------------------------- a command


@contextlib.contextmanager
def command(name: str, *, go_on: str = "") -> Iterator[None]:
    """Run a command inside: a mistake of its user becomes one sentence on standard error and exit code 2.

    go_on: what to do after Ctrl-C, which ends the command with one line and exit code 130.
    Warnings are sentences as well. If the reader of the output has gone (`uat list | head -1`), the command ends and
    says nothing.
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
    """Ctrl-C inside ends the process with one line, whatever it does: for imports, which would turn a
    KeyboardInterrupt into a page of foreign lines, or into an ImportError."""

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
    """Say what went wrong, in a readable number of letters; the exit code."""
    short = sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST - 3]}..."
    with contextlib.suppress(BrokenPipeError):
        say(f"{name}: {short}")
    return 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch says so by a RuntimeError."""
    said = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or said


def prepare_streams() -> None:
    """Let standard output and error show what their encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush_output() -> None:
    """What was printed before an error is kept, if it can be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Nothing is left to be written when the interpreter ends: that would fail, and say so."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (stream for stream in (sys.stdout, sys.stderr) if stream is not None):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # a stream without a file has nothing left to write
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
