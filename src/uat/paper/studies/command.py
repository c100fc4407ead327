"""The command behind `uat reproduce` and `python -m uat.paper.studies`."""

from __future__ import annotations

from collections.abc import Callable

from uat.evaluation.tables import columns, print_rows
from uat.paper.studies.options import Reproduce
from uat.paper.studies.reproduce import plan, reproduce
from uat.terminal import say, show_json, show_page
from uat.training.ranks import launched


def command(options: Reproduce, report: Callable[[Reproduce], str | None] = lambda options: None) -> int:
    """Run a study, with data to stdout and progress to stderr; return 1 if something failed, 0 otherwise.

    report: writes a page of the results and returns its path, or None if it cannot.
    """
    if launched().count > 1:
        raise ValueError(
            "torchrun is for one large training (uat train); a study distributes its cells itself: start it once"
        )
    if options.dry_run:
        rows = plan(options)
        print_rows(rows, as_json=options.json)
        return 0
    done = reproduce(options)
    for reason in done.missing:
        say(f"left out: {reason}")
    page = report(options)
    summary = {
        "results": str(options.folder),
        "cells": done.cells,
        "done before": done.done_before,
        "done now": done.trained,
        "failed": len(done.failed),
        "report": page or "-",
    }
    failures = [{"failed": name, "why": why} for name, why in done.failed.items()]
    if options.json:
        show_json({**summary, "failed": done.failed})
    else:
        print_rows([summary], as_json=False)
        if failures:
            show_page(f"\n{columns(failures)}\n\nrun the same command again to retry these")
    return 1 if failures else 0
