"""Names of runs that should not move, and committed rows that a study still finds done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.identities import FILE, lines
from uat.files import read_rows
from uat.paper.studies.cells import Filter
from uat.paper.studies.grids import STUDIES

RESULTS = Path(__file__).parents[2] / "results" / "paper"


def test_runs_have_the_names_that_they_had() -> None:
    assert lines() == FILE.read_text().splitlines(), (
        "a run has another name, so rows on disk are orphaned: if it is a new pair, see tests/golden/identities.py"
    )


@pytest.mark.parametrize(("domain", "runs"), [("darkroom", 171), ("sepsis", 81)])
def test_every_committed_row_is_of_a_run_that_a_study_asks_for(domain: str, runs: int) -> None:
    """Rows of the other domains are of data that are not in the repository."""
    committed = {row["run"] for row in read_rows(RESULTS / f"{domain}.jsonl")} - {""}
    assert len(committed) == runs
    usual = Filter(domains=(domain,))
    earlier = Filter(domains=(domain,), settings={"domain.reward_scale": 20.0} if domain == "sepsis" else {})
    cells = {
        cell.identity
        for study in STUDIES.values()
        for chosen in (usual, earlier)
        for cell in study.cells("paper", (0, 1, 2), chosen)
    }
    assert committed <= cells
