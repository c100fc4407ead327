"""Logged steps: what the logging policy did, with what probability, and what the target policy would have done.

A `LoggedSteps` is all that the estimates need. Numbers are checked where they enter and kept in float64, because
weights are products of many ratios. Padding is neutral: ratio 1 and reward 0. Beside the library's axes: F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uat.checks import as_tensor, check_ids, check_mask, check_valid
from uat.episode import TensorFields, Trajectory

ROUNDING = 1e-4
"""Excess over 1 that counts as rounding in probabilities, which may be float32, and in their sums."""


@dataclass(slots=True, kw_only=True)
class LoggedSteps(TensorFields):
    """B logged episodes with the probabilities of the logging (behaviour) policy and of the target policy."""

    reward_BT: Tensor
    target_BT: Tensor
    """Probability of the logged action under the target policy, given the logged history."""
    propensity_BT: Tensor
    """Probability of the logged action under the logging policy: above 0 and at most 1."""
    valid_BT: Tensor | None = None
    """True for real steps, False for padding. None: all steps are real."""
    reward_known_BT: Tensor | None = None
    """False where the reward is unknown. None: all are known."""
    target_BTA: Tensor | None = None
    """Probabilities of all actions under the target policy: needed for values that depend on the action."""
    behaviour_BTA: Tensor | None = None
    """Probabilities of all actions under the logging policy: shows which actions the log can never hold."""
    action_BT: Tensor | None = None
    """Ids of the logged actions; needed with `target_BTA`."""
    features_BTF: Tensor | None = None
    """Numbers that describe the history before each action, from which values are fitted."""

    def __post_init__(self) -> None:
        shape = tuple(as_tensor("reward_BT", self.reward_BT).shape)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"reward_BT: expected shape (episodes, steps) with at least one of each, got {shape}")
        if self.valid_BT is None:
            self.valid_BT = torch.ones(shape, dtype=torch.bool)
        valid_BT = self.valid_BT = check_valid(self.valid_BT, shape)
        known_BT = valid_BT
        if self.reward_known_BT is not None:
            self.reward_known_BT = check_mask("reward_known_BT", self.reward_known_BT, shape)
            known_BT = valid_BT & self.reward_known_BT
        self.reward_BT = finite("reward_BT", self.reward_BT, shape, known_BT)
        self.target_BT = probabilities("target_BT", self.target_BT, shape, valid_BT, filling=1.0)
        self.propensity_BT = probabilities("propensity_BT", self.propensity_BT, shape, valid_BT, filling=1.0)
        if (zero_BT := self.propensity_BT == 0).any():
            raise ValueError(
                f"propensity_BT: expected probabilities above 0, got 0 at {first(zero_BT)}: the logging policy took "
                f"this action, so its propensity cannot be 0; correct it, or estimate propensities"
            )
        self._check_all_actions(shape, valid_BT)
        if self.features_BTF is not None:
            given = as_tensor("features_BTF", self.features_BTF)
            if given.dim() != 3:
                raise ValueError(f"features_BTF: expected shape {(*shape, 'F')}, got {tuple(given.shape)}")
            self.features_BTF = finite("features_BTF", given, (*shape, given.shape[-1]), valid_BT)

    def _check_all_actions(self, shape: tuple[int, ...], valid_BT: Tensor) -> None:
        """Check the probabilities of all actions, and that they agree with those of the logged actions."""
        own = {"target_BTA": self.target_BT, "behaviour_BTA": self.propensity_BT}
        given = {name: x for name in own if (x := getattr(self, name)) is not None}
        if not given:
            return
        counts = {name: as_tensor(name, x).shape[-1] for name, x in given.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"expected the same number of actions, got {counts}")
        (count,) = set(counts.values())
        if self.action_BT is None:
            raise ValueError(f"{' and '.join(given)}: give the ids of the logged actions too, as action_BT")
        self.action_BT = check_ids("action_BT", self.action_BT, shape, count, valid_BT)
        for name, x in given.items():
            x_BTA = distributions(name, x, (*shape, count), valid_BT)
            setattr(self, name, x_BTA)
            chosen_BT = x_BTA.gather(-1, self.action_BT.clamp_min(0)[..., None])[..., 0]
            if (wrong_BT := ((chosen_BT - own[name]).abs() > ROUNDING) & valid_BT).any():
                where = first(wrong_BT)
                raise ValueError(
                    f"{name}: the logged action has probability {chosen_BT[where].item():g} at {where}, and "
                    f"{'target_BT' if name == 'target_BTA' else 'propensity_BT'} says {own[name][where].item():g}"
                )

    @property
    def real_BT(self) -> Tensor:
        """(B, T) True for real steps."""
        assert self.valid_BT is not None
        return self.valid_BT

    @property
    def known_BT(self) -> Tensor:
        """(B, T) True for real steps whose reward is known."""
        return self.real_BT if self.reward_known_BT is None else self.real_BT & self.reward_known_BT

    @property
    def ratio_BT(self) -> Tensor:
        """(B, T) probability of the logged action under the target policy, divided by its propensity; 1 in padding."""
        return self.target_BT / self.propensity_BT

    def unsupported(self) -> float:
        """Mean probability that the target policy takes an action that the logging policy never takes."""
        if self.target_BTA is None or self.behaviour_BTA is None:
            return 0.0
        missing_BT = (self.target_BTA * (self.behaviour_BTA == 0)).sum(-1)
        return missing_BT[self.real_BT].mean().item()


def logged_steps(
    trajectory: Trajectory,
    target_BTA: Tensor,
    *,
    propensity_BT: Any = None,
    behaviour_BTA: Any = None,
    features_BTF: Any = None,
) -> LoggedSteps:
    """Return the logged steps of a trajectory of discrete actions.

    target_BTA: see `action_probabilities`. Give the propensities of the logged actions, or, better, the probabilities
    of all actions under the logging policy (known, or estimated by `fit_behaviour`).
    """
    if trajectory.action.dim() != 2 or trajectory.action.is_floating_point():
        raise ValueError(
            f"action: expected ids (episodes, steps), got {trajectory.action.dtype} of shape "
            f"{tuple(trajectory.action.shape)}: weights of logged episodes exist for discrete actions alone"
        )
    if propensity_BT is None and behaviour_BTA is None:
        raise ValueError(
            "propensities are needed: give propensity_BT or behaviour_BTA; if the log has none, estimate "
            "behaviour_BTA with fit_behaviour"
        )
    shape, valid_BT = tuple(trajectory.valid.shape), trajectory.valid.cpu()
    action_BT = check_ids("action", trajectory.action, shape, target_BTA.shape[-1], valid_BT)
    index_BT1 = action_BT.clamp_min(0)[..., None]
    if propensity_BT is None:
        given = distributions("behaviour_BTA", behaviour_BTA, tuple(target_BTA.shape), valid_BT)
        propensity_BT = given.gather(-1, index_BT1)[..., 0]
    target_BTA = distributions("target_BTA", target_BTA, (*shape, target_BTA.shape[-1]), valid_BT)
    return LoggedSteps(
        reward_BT=trajectory.reward,
        valid_BT=valid_BT,
        reward_known_BT=trajectory.reward_known,
        target_BT=target_BTA.gather(-1, index_BT1)[..., 0],
        target_BTA=target_BTA,
        propensity_BT=propensity_BT,
        behaviour_BTA=behaviour_BTA,
        action_BT=action_BT,
        features_BTF=features_BTF,
    )


# ---------------------------------------------------------------- checks


def finite(name: str, values: Any, shape: tuple[int, ...], valid: Tensor) -> Tensor:
    """Return finite numbers as float64; invalid steps are not checked and become 0."""
    x = as_tensor(name, values)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    x = torch.where(valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())), x.double(), 0.0)
    if (wrong := ~x.isfinite()).any():
        raise ValueError(f"{name}: expected finite numbers, got {x[first(wrong)].item()} at {first(wrong)}")
    return x


def probabilities(name: str, values: Any, shape: tuple[int, ...], valid: Tensor, *, filling: float) -> Tensor:
    """Return probabilities from 0 to 1 as float64; invalid steps become `filling`."""
    x = finite(name, values, shape, valid)
    if (wrong := (x < 0) | (x > 1 + ROUNDING)).any():
        raise ValueError(
            f"{name}: expected probabilities from 0 to 1, got {x[first(wrong)].item():g} at {first(wrong)}"
        )
    return torch.where(valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())), x.clamp(max=1), filling)


def distributions(name: str, values: Any, shape: tuple[int, ...], valid_BT: Tensor) -> Tensor:
    """Return (B, T, A) probabilities that sum to 1 at every real step; uniform in padding."""
    x_BTA = probabilities(name, values, shape, valid_BT, filling=1 / shape[-1])
    if (wrong_BT := ((x_BTA.sum(-1) - 1).abs() > ROUNDING) & valid_BT).any():
        where = first(wrong_BT)
        raise ValueError(f"{name}: probabilities must sum to 1, got a sum of {x_BTA[where].sum().item():g} at {where}")
    return x_BTA


def first(wrong: Tensor) -> tuple[int, ...]:
    """Return the first place that is True."""
    return tuple(wrong.nonzero()[0].tolist())
