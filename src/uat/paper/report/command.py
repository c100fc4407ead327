"""What `uat report` and `python -m uat.paper.report` do, and their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from uat.config import PRESETS, lookup
from uat.paper.report.writing import Report, write_report
from uat.terminal import say, show, show_json


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Make tables, figures and one page of the rows in a folder of results; what is not measured yet is named."""

    results: Path
    """Folder of results, such as one that `uat reproduce` wrote."""
    out: Path | None = None
    """Folder of the report; unset: RESULTS/report."""
    preset: str | None = None
    """The preset of the rows; unset: the folder's name tells it."""
    json: bool = False
    """Print JSON instead of lines."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            lookup("preset", self.preset, PRESETS)


def command(options: ReportOptions) -> Report:
    """Write the report, and say on stdout where it is and on stderr what it lacks."""
    made = write_report(options.results, options.out, preset=options.preset)
    if options.json:
        found = {"page": str(made.page), "tables": made.tables, "figures": made.figures, "missing": made.missing}
        show_json(found, indent=None)
        return made
    show(made.page)
    for what, waits in made.missing.items():
        say(f"not measured yet: {what} ({waits})")
    return made
