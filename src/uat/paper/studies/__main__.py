"""`python -m uat.paper.studies STUDY`: the same flags as `uat reproduce`, without the command line's libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uat import terminal
from uat.flags import parse_flags
from uat.paper.studies.command import command
from uat.paper.studies.options import Reproduce


def main(argv: Sequence[str] | None = None) -> None:
    with terminal.command("uat.paper.studies", go_on="run the same command again to resume"):
        options = parse_flags(Reproduce, "python -m uat.paper.studies", argv, positional=("study",))
        sys.exit(command(options))


if __name__ == "__main__":
    main()
