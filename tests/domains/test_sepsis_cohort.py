"""Patients: the synthetic ones have the published statistics, a user's own are loaded whole or refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from uat.domains.domain import Split
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.domains.sepsis.cohort import KEY, Cohort, load, prepare
from uat.domains.sepsis.copula import POINTS, QSOFA_PARTS, QSOFA_POINT, RACES, YES_OR_NO, draw_cohort, summary
from uat.domains.sepsis.marginals import moments, steps
from uat.noise import derive


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return draw_cohort(25_000, derive(0, "sepsis", "cohort"))


@pytest.fixture(scope="module")
def cohort() -> Cohort:
    return prepare(None)


def column(table: np.ndarray, name: str) -> np.ndarray:
    return table[:, summary().at(name)]


# ---------------------------------------------------------------- the synthetic cohort


def test_correlations_are_the_published_ones(table: np.ndarray) -> None:
    columns = summary().columns
    apart = np.abs(np.corrcoef(table.T) - summary().correlation)
    kept = [i for i, name in enumerate(columns) if name not in RACES]
    off = apart[np.ix_(kept, kept)][np.triu_indices(len(kept), 1)]
    assert off.mean() < 0.01
    assert off.max() < 0.04
    race = [i for i, name in enumerate(columns) if name in RACES]
    assert apart[race].max() < 0.15


def test_columns_have_the_published_means_and_deviations(table: np.ndarray) -> None:
    loose = {*POINTS, "qsofa"}  # rounded to whole points, or the sum of three columns
    for i, name in enumerate(summary().columns):
        allowed = 0.1 if name in loose else 0.03
        assert table[:, i].mean() == pytest.approx(summary().mean[i], abs=allowed), name
        assert table[:, i].std() == pytest.approx(summary().std[i], abs=allowed), name


def test_continuous_columns_have_the_published_quantiles(table: np.ndarray) -> None:
    for name in ("HeartRate", "LACTATE", "MeanBP", "age"):
        quantiles = summary().quantiles[summary().at(name)]
        found = (column(table, name)[:, None] <= quantiles).mean(0)
        np.testing.assert_allclose(found, summary().levels, atol=0.01, err_msg=name)


def test_race_is_one_draw_and_yes_or_no_is_two_values(table: np.ndarray) -> None:
    chosen = np.stack([column(table, name) > 0 for name in RACES])
    assert (chosen.sum(0) == 1).all()
    for name in (*YES_OR_NO, *RACES):
        low, high = np.unique(column(table, name))
        assert low * high == pytest.approx(-1), name  # z-scored with its own share


def test_qsofa_is_the_sum_of_its_parts(table: np.ndarray) -> None:
    points = sum((column(table, name) > 0).astype(float) for name in QSOFA_PARTS)
    np.testing.assert_allclose(np.diff(np.unique(column(table, "qsofa"))), QSOFA_POINT)
    assert np.corrcoef(points, column(table, "qsofa"))[0, 1] == pytest.approx(1)


def test_steps_have_their_shares() -> None:
    mean, std = moments(steps([0.25, 0.75], [-1.0, 1.0]))
    assert (mean, std) == pytest.approx((0.5, 0.75**0.5), abs=2e-3)


def test_the_cohort_is_split_standardised_and_made_once(cohort: Cohort) -> None:
    assert (len(cohort.clinical_PF), cohort.num_train) == (25_000, 20_000)
    train_PF = cohort.clinical_PF[:20_000]
    torch.testing.assert_close(train_PF.mean(0), torch.zeros(46), rtol=0, atol=1e-4)
    torch.testing.assert_close(train_PF.std(0), torch.ones(46), rtol=0, atol=1e-3)
    assert prepare(None) is cohort


def test_twenty_components_explain_three_quarters(cohort: Cohort) -> None:
    assert 0.70 < cohort.explained < 0.78
    torch.testing.assert_close(cohort.components_FO.T @ cohort.components_FO, torch.eye(20), rtol=0, atol=1e-5)
    test_PF = cohort.clinical_PF[cohort.num_train :]
    kept = (test_PF @ cohort.components_FO).var(0).sum() / test_PF.var(0).sum()
    assert kept.item() == pytest.approx(cohort.explained, abs=0.01)  # also on patients it was not fitted on


def test_components_are_those_of_the_singular_vectors(cohort: Cohort) -> None:
    _, _, vectors = np.linalg.svd(cohort.clinical_PF[:20_000].double().numpy(), full_matrices=False)
    agreement = np.abs(np.diag(vectors[:20] @ cohort.components_FO.double().numpy()))
    assert agreement.min() > 0.99


# ---------------------------------------------------------------- a user's own


def write(file: Path, rows: np.ndarray, key: str = KEY) -> str:
    np.savez(file, **{key: rows})  # pyright: ignore[reportArgumentType]
    return str(file)


@pytest.fixture
def rows(table: np.ndarray) -> np.ndarray:
    """A file as gym-sepsis has it: 46 columns and the action."""
    return np.concatenate([table[:500], np.arange(500)[:, None] % 24], axis=1)


def test_a_file_is_loaded_split_and_played(rows: np.ndarray, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", rows)
    np.testing.assert_allclose(load(path), rows[:, :46])
    assert prepare(path).num_train == 400
    domain = Sepsis(SepsisConfig(cohort=path))
    splits: tuple[Split, ...] = ("train", "test")
    played = {split: domain.simulator(split, "cpu").noise(torch.arange(300), 0)["patient"] for split in splits}
    assert played["train"].max() < 400 <= played["test"].min()
    assert played["test"].max() < 500
    assert domain.setting == "cohort=own"  # by its name, wherever it lies


def test_a_file_that_changed_is_read_again(rows: np.ndarray, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", rows)
    before = prepare(path)
    write(tmp_path / "own.npz", rows[:400])
    assert len(prepare(path).clinical_PF) == 400 != len(before.clinical_PF)


def refused(path: str, *said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said[0])) as error:
        Sepsis(SepsisConfig(cohort=path))
    for part in (*said, path):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_file_is_refused_with_what_was_expected(rows: np.ndarray, tmp_path: Path) -> None:
    refused(str(tmp_path / "none.npz"), "does not exist", KEY)
    (tmp_path / "text.npz").write_text("ALBUMIN,ANION GAP\n")
    refused(str(tmp_path / "text.npz"), "cannot be read", KEY)
    np.save(tmp_path / "plain.npy", rows)
    refused(str(tmp_path / "plain.npy"), "a single array, not an archive", KEY)
    refused(write(tmp_path / "a.npz", rows, key="states"), f"has no key '{KEY}' but 'states'")
    refused(write(tmp_path / "pickled.npz", np.array([{}], dtype=object)), "cannot be read")


def test_wrong_columns_are_refused_with_what_was_expected(rows: np.ndarray, tmp_path: Path) -> None:
    refused(write(tmp_path / "a.npz", rows[:, :46]), "shape (500, 46)", "expected (patients, 47)", "then the action")
    refused(write(tmp_path / "b.npz", rows[0]), "shape (47,)")
    refused(write(tmp_path / "c.npz", rows.astype(str)), "expected numbers")
    refused(write(tmp_path / "d.npz", rows[:20]), "has 20 patients, expected at least 100")


def test_wrong_values_are_refused_with_row_column_and_units(rows: np.ndarray, tmp_path: Path) -> None:
    broken = rows.copy()
    broken[7, 15] = np.nan
    refused(write(tmp_path / "a.npz", broken), "nan in row 7, column LACTATE", "expected finite numbers: 1 are not")
    raw = rows.copy()
    raw[:, 11] = 85 + 15 * raw[:, 11]
    refused(write(tmp_path / "b.npz", raw), "column HeartRate has mean 8", "expected z-scores")
    constant = rows.copy()
    constant[:, 28] = 0.0
    refused(write(tmp_path / "c.npz", constant), "column age has mean 0 and deviation 0")
