"""Fitted values for doubly robust estimates: ridge regressions on given features, cross-fitted by episode.

Values of an episode come from regressions on the other folds alone, so that its own rewards never enter its value. The
values of deployment are fitted backwards in time: the value of step t + 1 under the target policy is part of what the
regression of step t predicts (fitted Q evaluation). Those of one step predict its reward alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.evaluation.off_policy.steps import LoggedSteps


@dataclass(frozen=True, slots=True)
class Values:
    """Values of logged steps under the target policy; any numbers leave doubly robust estimates unbiased, provided that
    they do not depend on the episode's own rewards and later steps."""

    logged_BT: Tensor
    """Value of the logged action."""
    mean_BT: Tensor
    """Mean value of the target policy's actions. Equal to `logged_BT` if values ignore the action: then each estimate
    multiplies one of them by the ratio, which keeps it unbiased."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """A linear regression for each action, on standardised features, as deviations from the mean outcome."""

    mean: Tensor
    shift_F: Tensor
    scale_F: Tensor
    weight_AF: Tensor
    """The first weight of each action is that of the constant 1."""

    @staticmethod
    def fit(x_RF: Tensor, action_R: Tensor, outcome_R: Tensor, actions: int, penalty: float) -> Ridge:
        """Fit R rows. Without rows, all values are 0; an action without rows has the mean outcome."""
        if not len(x_RF):
            none_F = x_RF.new_zeros(x_RF.shape[1])
            return Ridge(x_RF.new_zeros(()), none_F, none_F, x_RF.new_zeros(actions, x_RF.shape[1] + 1))
        mean, (shift_F, scale_F) = outcome_R.mean(), standardising(x_RF)
        design_RF = _design(x_RF, shift_F, scale_F)
        gram_AFF = penalty * torch.eye(design_RF.shape[1], dtype=x_RF.dtype).repeat(actions, 1, 1)
        moment_AF = x_RF.new_zeros(actions, design_RF.shape[1])
        for a in range(actions):
            rows_RF = design_RF[action_R == a]
            gram_AFF[a] += rows_RF.T @ rows_RF
            moment_AF[a] = rows_RF.T @ (outcome_R[action_R == a] - mean)
        return Ridge(mean, shift_F, scale_F, torch.linalg.solve(gram_AFF, moment_AF))

    def of_all(self, x_RF: Tensor) -> Tensor:
        """(..., A) values of all actions."""
        return self.mean + _design(x_RF, self.shift_F, self.scale_F) @ self.weight_AF.T


def standardising(x_RF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each feature, and 1 over its deviation: 0 for a constant feature, which is left out."""
    deviation_F = x_RF.std(0, correction=0)
    least_F = 1e-9 * x_RF.abs().amax(0).clamp_min(1e-12)
    return x_RF.mean(0), torch.where(deviation_F > least_F, 1 / deviation_F, 0.0)


def _design(x_RF: Tensor, shift_F: Tensor, scale_F: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x_RF[..., :1]), (x_RF - shift_F) * scale_F], dim=-1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The inputs of regressions: features, actions, and the target policy's probabilities."""

    features_BTF: Tensor
    action_BT: Tensor
    target_BTA: Tensor

    @staticmethod
    def of(steps: LoggedSteps) -> _Rows:
        """Without probabilities of all actions, values ignore the action: there is one regression for all."""
        if steps.features_BTF is None:
            raise ValueError("features_BTF are needed to fit values: numbers that describe the history at each step")
        if steps.target_BTA is None or steps.action_BT is None:
            one_BT = torch.ones_like(steps.reward_BT)
            return _Rows(steps.features_BTF, torch.zeros_like(one_BT, dtype=torch.long), one_BT[..., None])
        return _Rows(steps.features_BTF, steps.action_BT.clamp_min(0), steps.target_BTA)

    @property
    def actions(self) -> int:
        return self.target_BTA.shape[-1]


def fold_numbers(episodes: int, folds: int, seed: int) -> Tensor:
    """(B,) the fold of each episode; folds are random and of equal size, up to one episode."""
    if episodes < folds:
        raise ValueError(f"folds={folds} must not be more than the number of episodes, {episodes}")
    order_B = torch.randperm(episodes, generator=torch.Generator().manual_seed(seed))
    fold_B = torch.empty(episodes, dtype=torch.long)
    fold_B[order_B] = torch.arange(episodes) % folds
    return fold_B


def fit_values(steps: LoggedSteps, *, discount: float, folds: int, penalty: float, seed: int) -> Values:
    """Return cross-fitted values of the discounted rewards from each step to the end of its episode."""
    rows, fold_B = _Rows.of(steps), fold_numbers(len(steps.reward_BT), folds, seed)
    logged_BT, mean_BT = torch.zeros_like(steps.reward_BT), torch.zeros_like(steps.reward_BT)
    for fold in range(folds):
        held_B, next_B = fold_B == fold, torch.zeros(len(fold_B), dtype=rows.features_BTF.dtype)
        for t in reversed(range(steps.reward_BT.shape[1])):
            fitted_B = ~held_B & steps.real_BT[:, t]
            outcome_B = steps.reward_BT[:, t] + discount * next_B
            x_BF, action_B = rows.features_BTF[:, t], rows.action_BT[:, t]
            model = Ridge.fit(x_BF[fitted_B], action_B[fitted_B], outcome_B[fitted_B], rows.actions, penalty)
            q_BA = model.of_all(x_BF)
            next_B = torch.where(steps.real_BT[:, t], (rows.target_BTA[:, t] * q_BA).sum(-1), 0.0)
            mean_BT[held_B, t] = next_B[held_B]
            logged_BT[held_B, t] = q_BA.gather(1, action_B[:, None])[held_B, 0]
    return Values(torch.where(steps.real_BT, logged_BT, 0.0), mean_BT)


def fit_rewards(steps: LoggedSteps, *, folds: int, penalty: float, seed: int) -> Values:
    """Return cross-fitted values of the reward of each step, from one regression over all steps."""
    rows, fold_B = _Rows.of(steps), fold_numbers(len(steps.reward_BT), folds, seed)
    logged_BT, mean_BT = torch.zeros_like(steps.reward_BT), torch.zeros_like(steps.reward_BT)
    for fold in range(folds):
        held_B = fold_B == fold
        used_BT = steps.known_BT & ~held_B[:, None]
        data = rows.features_BTF[used_BT], rows.action_BT[used_BT], steps.reward_BT[used_BT]
        q_BTA = Ridge.fit(*data, rows.actions, penalty).of_all(rows.features_BTF[held_B])
        mean_BT[held_B] = (rows.target_BTA[held_B] * q_BTA).sum(-1)
        logged_BT[held_B] = q_BTA.gather(-1, rows.action_BT[held_B][..., None])[..., 0]
    return Values(torch.where(steps.real_BT, logged_BT, 0.0), torch.where(steps.real_BT, mean_BT, 0.0))
