"""A synthetic cohort from aggregates alone: a Gaussian copula with the published correlations and marginals.

Normal scores with a latent correlation go through each column's quantile function. That function is nonlinear, so
columns correlate less than their scores. The latent correlation of each pair is the one that gives the columns their
published correlation, computed with Hermite series,

  Corr(f(x), g(y)) = Σ_k a_k b_k ρ^k / (σ_f σ_g)      a_k = E[f(x) h_k(x)], with h_k the normalised Hermite polynomials,

and the matrix of all pairs is projected to the nearest correlation matrix.

Two groups of columns have no scores of their own. Race is one categorical draw: one score, cut into four shares, with
the latent correlations of the largest share. The qSOFA score is by definition the sum of its three parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import torch

from uat.domains.sepsis.marginals import SCORES, Array, Marginal, continuous, steps, two_valued
from uat.noise import uniform

RACES = ("race_hispanic", "race_black", "race_other", "race_white")
"""Parts of the cut score in rising order; the last is the largest share, and names the score."""
YES_OR_NO = (
    "is_male",
    "vent",
    "qsofa_sysbp_score",
    "qsofa_gcs_score",
    "qsofa_resprate_score",
    "blood_culture_positive",
)
QSOFA_PARTS = ("qsofa_sysbp_score", "qsofa_gcs_score", "qsofa_resprate_score")
POINTS = {"sofa": 0.33055, "lods": 0.36655, "elixhauser_hospital": 0.30492}
"""Height of one point of scores in whole points, from the steps between their published quantiles."""
SIRS_VALUES, SIRS_SHARES = (-2.0946, -1.0222, 0.0502, 1.1226), (0.07, 0.247, 0.343, 0.34)
"""Values of SIRS, and shares of patients that give its published quantiles, mean and deviation."""
QSOFA_POINT, QSOFA_TWO = 1.4447, 0.1694
"""Height of one point of qSOFA, and its value at two points."""
TERMS = 60
"""Terms of the Hermite series."""
LEAST_EIGENVALUE = 1e-6


@dataclass(frozen=True, slots=True)
class Summary:
    """The published aggregates."""

    columns: tuple[str, ...]
    levels: tuple[float, ...]
    mean: Array
    std: Array
    quantiles: Array
    correlation: Array

    def at(self, name: str) -> int:
        return self.columns.index(name)


@cache
def summary() -> Summary:
    """Return the aggregates in the package; `summary.json` names their source."""
    data = json.loads(resources.files("uat.domains.sepsis").joinpath("summary.json").read_text(encoding="utf-8"))
    size = len(data["columns"])
    correlation = np.eye(size)
    for i, row in enumerate(data["correlation_upper"]):
        correlation[i, i + 1 :] = correlation[i + 1 :, i] = row
    return Summary(
        columns=tuple(data["columns"]),
        levels=tuple(data["quantile_levels"]),
        mean=np.asarray(data["mean"]),
        std=np.asarray(data["std"]),
        quantiles=np.asarray(data["quantiles"]),
        correlation=correlation,
    )


def draw_cohort(patients: int, seed: int) -> Array:
    """(patients, 46) synthetic starting states in the units of the summary. Patient i does not depend on `patients`."""
    s = summary()
    marginals = _marginals(s)
    latent = _latent_correlation(s, marginals)
    uniforms = uniform(seed, "sepsis.cohort", torch.arange(patients), len(marginals))
    scores = torch.special.ndtri(uniforms).numpy() @ np.linalg.cholesky(latent).T
    table = np.empty((patients, len(s.columns)))
    for j, (name, marginal) in enumerate(marginals.items()):
        if name == RACES[-1]:
            _fill_races(table, marginal(scores[:, j]).astype(int), s)
        else:
            table[:, s.at(name)] = marginal(scores[:, j])
    points = sum((table[:, s.at(name)] > 0).astype(np.float64) for name in QSOFA_PARTS)
    table[:, s.at("qsofa")] = QSOFA_TWO + QSOFA_POINT * (points - 2)
    return table


def _marginals(s: Summary) -> dict[str, Marginal]:
    """Return the marginal of every column that has a score of its own."""
    marginals: dict[str, Marginal] = {}
    for i, name in enumerate(s.columns):
        quantiles, mean = [float(q) for q in s.quantiles[i]], float(s.mean[i])
        if name == RACES[-1]:
            shares = [two_valued(float(s.quantiles[s.at(race), 0]), float(s.mean[s.at(race)]))[1] for race in RACES]
            marginals[name] = steps([share / sum(shares) for share in shares], range(len(RACES)))
        elif name in YES_OR_NO:
            high, share = two_valued(quantiles[0], mean)
            marginals[name] = steps([1 - share, share], [quantiles[0], high])
        elif name == "sirs":
            marginals[name] = steps(SIRS_SHARES, SIRS_VALUES)
        elif name not in RACES and name != "qsofa":
            marginals[name] = continuous(s.levels, quantiles, mean, float(s.std[i]), POINTS.get(name))
    return marginals


def _fill_races(table: Array, race: np.ndarray, s: Summary) -> None:
    for index, name in enumerate(RACES):
        low = float(s.quantiles[s.at(name), 0])
        table[:, s.at(name)] = np.where(race == index, -1 / low, low)


def _latent_correlation(s: Summary, marginals: dict[str, Marginal]) -> Array:
    """Return the correlations of the scores that give the columns their published correlations."""
    order = [s.at(name) for name in marginals]
    target = s.correlation[np.ix_(order, order)]
    values = np.stack([marginal(SCORES) for marginal in marginals.values()])
    white = list(marginals).index(RACES[-1])
    values[white] = values[white] == len(RACES) - 1  # the correlations are those of the largest share against the rest
    series = _hermite(values)
    low, high = np.full_like(target, -1.0), np.full_like(target, 1.0)
    for _ in range(30):  # the correlation of the columns rises with that of their scores
        middle = (low + high) / 2
        above = _correlation(series, middle) > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return _nearest((low + high) / 2)


def _hermite(values: Array) -> Array:
    """(TERMS, columns) coefficients a_1, a_2, ... of each column, scaled to a standard deviation of one."""
    scaled = (values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True)
    coefficients, before, now = [], np.zeros_like(SCORES), np.ones_like(SCORES)
    for k in range(1, TERMS + 1):  # √k h_k = x h_(k-1) - √(k-1) h_(k-2)
        before, now = now, (SCORES * now - np.sqrt(k - 1) * before) / np.sqrt(k)
        coefficients.append(scaled @ now / len(SCORES))
    return np.stack(coefficients)


def _correlation(series: Array, latent: Array) -> Array:
    total, power = np.zeros_like(latent), np.ones_like(latent)
    for row in series:
        power = power * latent
        total += power * np.outer(row, row)
    return total


def _nearest(matrix: Array) -> Array:
    """Return the correlation matrix nearest to a symmetric one, by alternating projections (Higham 2002)."""
    x, correction = matrix.copy(), np.zeros_like(matrix)
    for _ in range(50):
        values, vectors = np.linalg.eigh(x - correction)
        positive = (vectors * np.maximum(values, LEAST_EIGENVALUE)) @ vectors.T
        correction = positive - (x - correction)
        x = positive.copy()
        np.fill_diagonal(x, 1.0)
    values, vectors = np.linalg.eigh(x)
    x = (vectors * np.maximum(values, LEAST_EIGENVALUE)) @ vectors.T
    scale = np.sqrt(np.diag(x))
    return x / np.outer(scale, scale)
