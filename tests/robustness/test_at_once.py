"""Several processes on one folder: each finishes, or prints one line that names the process with the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.kill import Campaign, difference
from tests.robustness.processes import Started
from uat.paper.studies.files import Results
from uat.runs import Run

EPOCHS = 12


def check_end(process: Started) -> bool:
    """Whether a process finished its work; otherwise it must have named the process with the lock."""
    code, said = process.wait(), process.said
    assert "Traceback" not in said
    if code == 0:
        return True
    assert code == 2, said
    assert said.count("uat: ") == 1, said
    last = said.splitlines()[-1]
    assert "is in use by " in last or "holds another run (" in last, said
    return False


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["one run", "two seeds"])
def test_two_trainings(seeds: tuple[int, int], tmp_path: Path) -> None:
    with Campaign(tmp_path, 0) as campaign:
        run, twin = tmp_path / "run", tmp_path / "twin"
        commands = [campaign.train("uat", run, epochs=EPOCHS, seed=seed) for seed in seeds]
        ended = [check_end(process) for process in [campaign.start(one, fresh=False) for one in commands]]
        kept = Run.open(run).config.seed
        assert ended[seeds.index(kept)] or seeds[0] == seeds[1]
        assert any(ended)
        assert campaign.start(campaign.train("uat", twin, epochs=EPOCHS, seed=kept), fresh=False).wait() == 0
    assert [row["epoch"] for row in Run.open(run).rows("metrics.jsonl")] == [*range(1, EPOCHS + 1)]
    assert difference(run, twin) is None


def test_a_grid_and_a_report(tmp_path: Path) -> None:
    """The folder already has rows of a smaller study, so that a report is possible."""
    with Campaign(tmp_path, 0) as campaign:
        folder, twin = tmp_path / "grid", tmp_path / "twin"
        grids = {out: campaign.reproduce(out, workers=1, epochs=3) for out in (folder, twin)}
        assert campaign.start([*grids[folder], "--methods", "vanilla"], fresh=False).wait() == 0
        commands = [grids[folder], grids[folder], ["uat", "report", folder, "--preset", "smoke"]]
        ended = [check_end(process) for process in [campaign.start(one, fresh=False) for one in commands]]
        assert any(ended[:2])
        assert campaign.start(grids[twin], fresh=False).wait() == 0
    rows = [Results(out).read("scores") for out in (folder, twin)]
    assert rows[0] == rows[1] != []
    for run in sorted((folder / "runs").glob("*-uat-*")):
        assert [row["epoch"] for row in Run.open(run).rows("metrics.jsonl")] == [1, 2, 3]
