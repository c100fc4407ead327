"""A folder has one writer at a time, and its lock names the writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import Watch
from uat.lock import FILE, NOTE_SECONDS, LockedError, locked

HOLD = """
import sys, time
from pathlib import Path
from uat.lock import locked
with locked(Path(sys.argv[1]), "holding on"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_the_second_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path, "training uat"),
        pytest.raises(LockedError) as caught,
        locked(tmp_path, "training vanilla"),
    ):
        pytest.fail("both hold the lock")
    assert f"{tmp_path} is in use by process {os.getpid()} (training uat, since 20" in str(caught.value)


def test_a_lock_ends_with_its_holder_however_that_ends_and_can_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, watch = holder(tmp_path), Watch()
    try:
        with pytest.raises(LockedError, match=rf"process {child.pid} \(holding on, since"), locked(tmp_path, "mine"):
            pytest.fail("both hold the lock")
        with monkeypatch.context() as patch:
            patch.setattr("uat.lock.time", watch)
            with pytest.raises(LockedError), locked(tmp_path, "mine", wait_seconds=30):
                pytest.fail("both hold the lock")
        assert 30 <= watch.now < 31
    finally:
        child.kill()
        child.communicate()
    with locked(tmp_path, "mine", wait_seconds=60):
        assert (tmp_path / FILE).exists()


def test_a_lock_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "new", "first"):
            pass
    assert (tmp_path / "new" / FILE).read_bytes() == b""


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """Otherwise taking a lock would truncate another file."""
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"\.lock"), locked(tmp_path / "folder", "mine"):
        pytest.fail("followed the link")
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr("uat.lock.time", watch)
    return watch


def test_a_torn_note_of_the_holder_is_no_error(tmp_path: Path, watch: Watch) -> None:
    with locked(tmp_path, "first"):
        (tmp_path / FILE).write_text('{"what": "fi')
        with pytest.raises(LockedError, match="in use by another process"), locked(tmp_path, "second"):
            pytest.fail("both hold the lock")
    assert NOTE_SECONDS <= watch.now < NOTE_SECONDS + 1


def test_the_note_of_a_holder_that_has_just_begun_is_waited_for(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes started together meet between the first one's lock and its note."""
    with locked(tmp_path, "first"):
        note = (tmp_path / FILE).read_text()
        (tmp_path / FILE).write_text("")
        monkeypatch.setattr(watch, "sleep", lambda seconds: (tmp_path / FILE).write_text(note))
        with pytest.raises(LockedError, match=rf"process {os.getpid()} \(first, since"), locked(tmp_path, "second"):
            pytest.fail("both hold the lock")
