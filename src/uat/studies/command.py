"""What `uat reproduce` and `python -m uat.studies` do, once their flags are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from uat.evaluation.tables import columns
from uat.studies.options import Reproduce
from uat.studies.reproduce import plan, reproduce
from uat.training.ranks import launched


def command(options: Reproduce, report: Callable[[Reproduce], str | None] = lambda options: None) -> int:
    """Data to stdout, progress to stderr; 1 if something failed, 0 otherwise.

    report: makes a page of the results and says where it is; None if it cannot.
    """
    if launched().count > 1:
        raise ValueError(
            "torchrun is for one large training (uat train); a grid hands out its cells itself: start it once"
        )
    if options.dry_run:
        rows = plan(options)
        print(json.dumps(rows, indent=2) if options.json else columns(rows))
        return 0
    done = reproduce(options)
    for said in done.missing:
        print(f"left out: {said}", file=sys.stderr)
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
    print(json.dumps({**summary, "failed": done.failed}, indent=2) if options.json else columns([summary]))
    if failures and not options.json:
        print(f"\n{columns(failures)}\n\nrun the same command again to try these once more")
    return 1 if failures else 0
