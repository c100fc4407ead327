"""A user's data files enter the identity of a run by their contents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from uat.config import override
from uat.data.contents import checksum
from uat.domains import DOMAINS
from uat.recipes import recipe

FILES = [(domain, name) for domain, entry in DOMAINS.items() for name in entry.files]


@pytest.mark.parametrize(("domain", "name"), FILES)
def test_a_file_that_moved_is_the_same_data_and_a_changed_one_is_not(domain: str, name: str, tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        return override(recipe(domain, "uat", "smoke"), {f"domain.{name}": str(path)}).identity()

    file, moved, other = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"
    np.savez(file, x=np.arange(3), y=np.array(["a"]))
    np.savez_compressed(moved, y=np.array(["a"]), x=np.arange(3))
    np.savez(other, x=np.arange(1, 4), y=np.array(["a"]))
    assert identity(file) == identity(moved) != identity(other)
    before = identity(other)
    np.savez(other, x=np.arange(5, 9), y=np.array(["a"]))
    assert identity(other) != before, "changed in place"
    assert len(FILES) == 3


def test_checksums_exist_for_archives_only_and_broken_ones_use_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"no arrays")
    assert checksum(tmp_path) is None
    assert checksum(tmp_path / "none.npz") is None
    found = checksum(tmp_path / "broken.npz")
    assert found
    (tmp_path / "again.npz").write_bytes(b"other bytes, no arrays")
    assert found != checksum(tmp_path / "again.npz")
