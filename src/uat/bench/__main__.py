"""`python -m uat.bench`: the same flags as `uat bench`, without the command line's libraries."""

from __future__ import annotations

from collections.abc import Sequence

from uat import terminal
from uat.bench.options import Bench
from uat.bench.report import report
from uat.flags import parse_flags


def main(argv: Sequence[str] | None = None) -> None:
    with terminal.command("uat.bench"):
        report(parse_flags(Bench, "python -m uat.bench", argv))


if __name__ == "__main__":
    main()
