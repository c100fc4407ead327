"""`python -m uat.paper.report DIR`: the same as `uat report`, without the command line's libraries."""

from __future__ import annotations

from collections.abc import Sequence

from uat import terminal
from uat.flags import parse_flags
from uat.paper.report.command import ReportOptions, command


def main(argv: Sequence[str] | None = None) -> None:
    with terminal.command("uat.paper.report"):
        command(parse_flags(ReportOptions, "python -m uat.paper.report", argv, positional=("results",)))


if __name__ == "__main__":
    main()
