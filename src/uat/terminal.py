"""What reaches a terminal: one line a message, no control characters, and nothing that its encoding lacks."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any


def plain(text: Any) -> str:
    """Text of a file or an error on one line; what could move the cursor or reorder the line is shown as an escape."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(str(text).split("\n"))
    )


def say(text: Any) -> None:
    """A line on standard error."""
    print(plain(text), file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Let standard output and error show what their encoding lacks in another way, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")


def encodable(text: str) -> str:
    """± as +/- where standard output cannot show it."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.replace("±", "+/-")
    return text


@contextlib.contextmanager
def one_line_warnings(program: str, kind: type[Warning]) -> Iterator[None]:
    """Show warnings of this kind as one line on standard error inside, and all others as Python does."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, kind):
                say(f"{program}: {message}")
            else:
                show(message, category, *where, **more)

        warnings.showwarning = shown
        yield
