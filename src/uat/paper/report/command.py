"""The command behind `uat report` and `python -m uat.paper.report`, and its flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from uat.config import PRESETS, lookup
from uat.paper.report.writing import Report, write_report
from uat.terminal import say, show, show_json


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write tables, figures and one page from a folder of results, and list what has not been measured yet."""

    results: Path
    """Folder of results, such as one written by `uat reproduce`."""
    out: Path | None = None
    """Folder of the report; by default RESULTS/report."""
    preset: str | None = None
    """Preset of the rows; by default taken from the rows or from the folder's name."""
    json: bool = False
    """Print JSON instead of lines."""

    def __post_init__(self) -> None:
        if self.preset is not None:
            lookup("preset", self.preset, PRESETS)


def command(options: ReportOptions) -> Report:
    """Write the report; print its path to stdout, and missing measurements to stderr."""
    report = write_report(options.results, options.out, preset=options.preset)
    if options.json:
        summary = {
            "page": str(report.page),
            "tables": report.tables,
            "figures": report.figures,
            "missing": report.missing,
        }
        show_json(summary, indent=None)
        return report
    show(report.page)
    for what, needed in report.missing.items():
        say(f"not measured yet: {what} ({needed})")
    return report
