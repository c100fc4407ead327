"""A few kills of the campaign in `kill.py`; `make kill` does a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.kill import Campaign, complaint, difference, shares, survivors
from tests.robustness.processes import children, wait_for, workers

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path, seed=0)


@pytest.mark.parametrize("kind", ["training", "session"])
def test_what_was_killed_and_resumed_equals_what_was_not(kind: str, campaign: Campaign) -> None:
    with campaign:
        campaign.run(kind, 2 if kind == "training" else 1)
    row = campaign.rows[kind]
    assert (row.differences, row.left_over) == ([], 0)
    assert row.resumed >= 1


def test_no_worker_outlives_a_killed_grid_and_the_rest_is_done_later(campaign: Campaign, tmp_path: Path) -> None:
    """The twin has no workers, which must not change any number."""
    killed, twin = tmp_path / "killed", tmp_path / "twin"
    with campaign:
        process = campaign.start(campaign.reproduce(killed, epochs=4), fresh=False)
        wait_for("two workers", lambda: len(workers(process.pid)) == 2 or process.code is not None)
        others = children(process.pid)
        assert process.kill()
        wait_for("the end of the workers", lambda: not survivors(others))
        for folder in (killed, twin):
            assert campaign.start(campaign.reproduce(folder, workers=1, epochs=4), fresh=False).wait() == 0
    assert difference(killed, twin) is None


# ---------------------------------------------------------------- the campaign itself


def test_the_campaign_sees_a_changed_byte_and_a_lost_file(tmp_path: Path) -> None:
    for name in ("own", "twin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"123")
        (tmp_path / name / "timing.jsonl").write_text(name)
    assert difference(tmp_path / "own", tmp_path / "twin") is None
    (tmp_path / "own" / "weights").write_bytes(b"124")
    assert "weights differs" in str(difference(tmp_path / "own", tmp_path / "twin"))
    (tmp_path / "own" / "weights").unlink()
    assert "(none, 3 bytes)" in str(difference(tmp_path / "own", tmp_path / "twin"))


@pytest.mark.parametrize(
    ("code", "failed", "killed", "said"),
    [
        (0, "{}", True, None),
        (1, '{"a": "its worker was killed"}', True, None),
        (0, '{"a": "its worker was killed"}', True, "exit code 0 with 1 failures"),
        (1, '{"a": "its worker was killed", "b": "its worker was killed"}', True, "2 jobs failed after 1 kills: a, b"),
        (1, '{"a": "ValueError"}', True, "something else failed: {'a': 'ValueError'}"),
    ],
)
def test_a_grid_may_fail_one_job_for_one_killed_worker(code: int, failed: str, killed: bool, said: str | None) -> None:
    assert complaint(code, f'progress\n{{\n  "failed": {failed}\n}}', killed) == said


def test_every_kill_is_of_some_kind() -> None:
    assert shares(100) == {"training": 45, "session": 25, "grid": 15, "worker": 15}
    assert sum(shares(7).values()) == 7
