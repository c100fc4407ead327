"""Propensities estimated from the log itself: a fitted behaviour model, and the table that says how good it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from uat.checks import as_tensor, check_ids, check_mask, check_valid
from uat.evaluation.off_policy.steps import distributions, finite
from uat.evaluation.off_policy.values import fold_numbers, standardising
from uat.settings import Between, Count, Scale, Seed, checked


@dataclass(frozen=True, slots=True)
class BehaviourModel:
    """Multinomial logistic regression: probabilities of the logging policy's actions from features of the history."""

    shift_F: Tensor
    scale_F: Tensor
    weight_AF: Tensor
    """The first weight of each action is that of the constant 1."""

    def probabilities(self, features_BTF: Any, allowed_BTA: Any = None) -> Tensor:
        """(B, T, A) probabilities of all actions; 0 where an action is not allowed."""
        x = as_tensor("features_BTF", features_BTF).double()
        if x.shape[-1] != len(self.shift_F):
            raise ValueError(f"features_BTF: expected {len(self.shift_F)} features, got {x.shape[-1]}")
        scores = self._scores((x - self.shift_F) * self.scale_F, self.weight_AF)
        if allowed_BTA is not None:
            scores = scores.masked_fill(~as_tensor("allowed_BTA", allowed_BTA), -torch.inf)
        return scores.softmax(-1)

    @staticmethod
    def _scores(scaled: Tensor, weight_AF: Tensor) -> Tensor:
        return weight_AF[:, 0] + scaled @ weight_AF[:, 1:].T

    @staticmethod
    def fit(x_RF: Tensor, action_R: Tensor, allowed_RA: Tensor | None, actions: int, penalty: float) -> BehaviourModel:
        """Fit R rows by the most likely weights, with a quadratic penalty on all but the constants."""
        shift_F, scale_F = standardising(x_RF)
        scaled_RF = (x_RF - shift_F) * scale_F
        weight_AF = torch.zeros(actions, x_RF.shape[1] + 1, dtype=x_RF.dtype, requires_grad=True)
        search = torch.optim.LBFGS([weight_AF], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            search.zero_grad()
            scores_RA = BehaviourModel._scores(scaled_RF, weight_AF)
            if allowed_RA is not None:
                scores_RA = scores_RA.masked_fill(~allowed_RA, -torch.inf)
            nll = -scores_RA.log_softmax(-1).gather(1, action_R[:, None]).mean()
            small = 1e-6 * weight_AF[:, 0].square().sum()  # constants of actions that never occur stay finite
            total = nll + (penalty * weight_AF[:, 1:].square().sum() + small) / (2 * len(action_R))
            total.backward()
            return total

        with torch.enable_grad():
            search.step(loss)
        return BehaviourModel(shift_F, scale_F, weight_AF.detach())


def fit_behaviour(
    features_BTF: Any,
    action_BT: Any,
    *,
    actions: int,
    valid_BT: Any = None,
    allowed_BTA: Any = None,
    ridge: float = 1.0,
) -> BehaviourModel:
    """Return the behaviour model of a log, fitted to all of its real steps.

    Features must hold everything on which the logging policy's choice depended and which also affects rewards; no
    estimate can correct for what they leave out.
    """
    log = _checked_log(features_BTF, action_BT, actions, valid_BT, allowed_BTA)
    return BehaviourModel.fit(*log.rows(log.valid_BT), actions, checked(ridge, Scale, "ridge"))


def cross_fitted_behaviour(
    features_BTF: Any,
    action_BT: Any,
    *,
    actions: int,
    valid_BT: Any = None,
    allowed_BTA: Any = None,
    ridge: float = 1.0,
    folds: Annotated[int, Between(2, 1000)] = 5,
    seed: int = 0,
) -> Tensor:
    """Return (B, T, A) probabilities in which each episode is predicted by a model of the other folds, as a
    `calibration` table needs them."""
    log, fold_B = _checked_log(features_BTF, action_BT, actions, valid_BT, allowed_BTA), None
    folds = checked(folds, Annotated[int, Between(2, 1000)], "folds")
    fold_B = fold_numbers(len(log.valid_BT), folds, checked(seed, Seed, "seed"))
    result_BTA = torch.zeros(*log.valid_BT.shape, actions, dtype=torch.float64)
    for fold in range(folds):
        held_B = fold_B == fold
        rows = log.rows(log.valid_BT & ~held_B[:, None])
        model = BehaviourModel.fit(*rows, actions, checked(ridge, Scale, "ridge"))
        allowed_KTA = None if log.allowed_BTA is None else log.allowed_BTA[held_B]
        result_BTA[held_B] = model.probabilities(log.features_BTF[held_B], allowed_KTA)
    return result_BTA


@dataclass(frozen=True, slots=True)
class _Log:
    """The checked inputs of a behaviour model."""

    features_BTF: Tensor
    action_BT: Tensor
    valid_BT: Tensor
    allowed_BTA: Tensor | None

    def rows(self, used_BT: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        allowed_RA = None if self.allowed_BTA is None else self.allowed_BTA[used_BT]
        return self.features_BTF[used_BT], self.action_BT[used_BT], allowed_RA


def _checked_log(features_BTF: Any, action_BT: Any, actions: int, valid_BT: Any, allowed_BTA: Any) -> _Log:
    actions = checked(actions, Count, "actions")
    x = as_tensor("features_BTF", features_BTF)
    if x.dim() != 3 or 0 in x.shape[:2]:
        raise ValueError(f"features_BTF: expected shape (episodes, steps, features), got {tuple(x.shape)}")
    shape = (x.shape[0], x.shape[1])
    real_BT = torch.ones(shape, dtype=torch.bool) if valid_BT is None else check_valid(valid_BT, shape)
    ids_BT = check_ids("action_BT", action_BT, shape, actions, real_BT)
    if allowed_BTA is not None:
        allowed_BTA = check_mask("allowed_BTA", allowed_BTA, (*shape, actions)) | ~real_BT[..., None]
        hit_BT = allowed_BTA.gather(-1, ids_BT.clamp_min(0)[..., None])[..., 0]
        if (missed_BT := ~hit_BT & real_BT).any():
            where = tuple(missed_BT.nonzero()[0].tolist())
            raise ValueError(f"action_BT: action {ids_BT[where].item()} at {where} is not allowed there")
    return _Log(finite("features_BTF", x, tuple(x.shape), real_BT), ids_BT, real_BT, allowed_BTA)


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Actions whose predicted probability lies in one range."""

    low: float
    high: float
    count: int
    """Number of (step, action) pairs, each action of each real step counted once."""
    expected: float
    """Mean predicted probability."""
    observed: float
    """Share of pairs in which the action was taken."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted probabilities of actions beside their observed frequencies."""

    bins: tuple[CalibrationBin, ...]

    @property
    def ece(self) -> float:
        """Expected calibration error: mean distance of expected and observed, weighted by the number of pairs."""
        total = sum(b.count for b in self.bins)
        return sum(b.count * abs(b.expected - b.observed) for b in self.bins) / total

    def __str__(self) -> str:
        lines = ["probability      pairs  expected  observed"]
        for b in self.bins:
            lines.append(f"{b.low:.2f} to {b.high:.2f} {b.count:>8}  {b.expected:>8.3f}  {b.observed:>8.3f}")
        return "\n".join([*lines, f"expected calibration error {self.ece:.4f}"])


def calibration(behaviour_BTA: Any, action_BT: Any, *, valid_BT: Any = None, bins: int = 10) -> Calibration:
    """Return how often actions were taken, by their predicted probability. Empty bins are left out.

    Use predictions for episodes to which the model was not fitted (`cross_fitted_behaviour`).
    """
    bins, given = checked(bins, Annotated[int, Between(1, 1000)], "bins"), as_tensor("behaviour_BTA", behaviour_BTA)
    if given.dim() != 3:
        raise ValueError(f"behaviour_BTA: expected shape (episodes, steps, actions), got {tuple(given.shape)}")
    shape = (given.shape[0], given.shape[1])
    real_BT = torch.ones(shape, dtype=torch.bool) if valid_BT is None else check_valid(valid_BT, shape)
    expected_BTA = distributions("behaviour_BTA", given, tuple(given.shape), real_BT)
    ids_BT = check_ids("action_BT", action_BT, shape, given.shape[-1], real_BT)
    expected_P = expected_BTA[real_BT].flatten()
    observed_P = (ids_BT[real_BT][:, None] == torch.arange(given.shape[-1])).double().flatten()
    bin_P = (expected_P * bins).long().clamp(max=bins - 1)
    rows = []
    for b in range(bins):
        if (inside_P := bin_P == b).any():
            shares = {"expected": expected_P[inside_P].mean().item(), "observed": observed_P[inside_P].mean().item()}
            rows.append(CalibrationBin(low=b / bins, high=(b + 1) / bins, count=int(inside_P.sum()), **shares))
    return Calibration(tuple(rows))
