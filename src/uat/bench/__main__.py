"""`python -m uat.bench`: the same flags as `uat bench`, without the command line's libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uat.bench.options import Bench
from uat.bench.report import report
from uat.flags import parse_flags


def main(argv: Sequence[str] | None = None) -> None:
    try:
        report(parse_flags(Bench, "python -m uat.bench", argv))
    except (ValueError, OSError) as error:
        print(f"uat.bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
