"""Studies of methods and domains outside the paper, which take part if they are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import uat
from tests.test_mistakes import Coins
from uat.methods.vanilla import Vanilla
from uat.paper.report.rows import Rows
from uat.paper.report.writing import tables_of
from uat.paper.studies import STUDIES, Reproduce, reproduce
from uat.paper.studies.cells import Filter


class Own(Vanilla):
    """A method outside the paper."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    uat.register_method("own", Own)
    uat.register_domain("coins", Coins)
    yield
    del uat.METHODS["own"], uat.DOMAINS["coins"]


def test_a_study_grows_by_what_is_named_alone() -> None:
    plain = STUDIES["main"].cells("smoke")
    assert {cell.config.method_name for cell in plain} <= set(uat.METHODS.own)
    assert {cell.config.domain_name for cell in plain} == set(uat.DOMAINS.own)
    with_own = STUDIES["main"].cells("smoke", chosen=Filter(methods=("own", "uat"), domains=("coins", "sepsis")))
    seen = {(cell.config.domain_name, cell.config.method_name) for cell in with_own}
    assert seen == {(domain, method) for domain in ("coins", "sepsis") for method in ("own", "uat")}
    assert STUDIES["sensitivity"].cells("smoke", chosen=Filter(domains=("coins",))) == []


def test_a_study_of_somebody_elses_goes_from_rows_to_tables(tmp_path: Path) -> None:
    out = tmp_path / "results"
    chosen = {"domains": ("coins",), "methods": ("vanilla", "own")}
    options = Reproduce(study="main", preset="smoke", device="cpu", out=out, workers=1, **chosen)
    assert reproduce(options).failed == {}
    assert reproduce(options).trained == 0
    tables = tables_of(Rows.of(out, "smoke"), "main")
    (table,) = [table for table in tables if table.name == "main-coins-return"]
    assert [row[0] for row in table.rows] == ["vanilla", "own", "expert"]
