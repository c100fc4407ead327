"""`python -m uat.report DIR`: the same as `uat report`, without the command line's libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uat.flags import parse_flags
from uat.report.command import ReportOptions, command


def main(argv: Sequence[str] | None = None) -> None:
    try:
        command(parse_flags(ReportOptions, "python -m uat.report", argv, positional=("results",)))
    except (ValueError, OSError) as error:
        print(f"uat.report: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
