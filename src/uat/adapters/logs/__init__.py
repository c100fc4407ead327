"""A user's log of decisions as a domain: `logs:FILE` on the command line.

`preparation(run)` returns what turns raw rows into observations, without the log. Nothing here imports polars before
a log is read.
"""

from uat.adapters.logs.checking import check
from uat.adapters.logs.config import SHORT, LogsConfig
from uat.adapters.logs.domain import LogsDomain, known_as
from uat.adapters.logs.files import digest
from uat.adapters.logs.preparation import Preparation, preparation
from uat.domains.entry import DomainEntry

__all__ = ["ENTRY", "LogsConfig", "LogsDomain", "Preparation", "check", "entry_of", "known_as", "preparation"]

ENTRY = DomainEntry(
    build=LogsDomain,
    config=LogsConfig,
    tasks=("default",),
    summary="your log of decisions",
    files=("path",),
    digest=digest,
    short_flags=SHORT,
    known_as=known_as,
    check=check,
)


def entry_of(name: str) -> DomainEntry:
    """Return the entry of every log; the settings name its file."""
    return ENTRY
