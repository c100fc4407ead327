"""Estimated propensities: the model recovers the logging policy, and calibration shows whether it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from uat.evaluation.off_policy import (
    LoggedSteps,
    OffPolicyConfig,
    calibration,
    cross_fitted_behaviour,
    deployment,
    fit_behaviour,
)

WEIGHT_AF = torch.tensor([[0.0, 1.0, -1.0], [0.5, -1.0, 0.0], [-0.5, 0.0, 2.0]]).double()


def log(episodes: int = 1500, steps: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, actions and the true probabilities of a logistic logging policy."""
    generator = torch.Generator().manual_seed(seed)
    features_BTF = 3 + 2 * torch.randn(episodes, steps, 2, generator=generator).double()
    scores_BTA = WEIGHT_AF[:, 0] + (features_BTF - 3) / 2 @ WEIGHT_AF[:, 1:].T
    true_BTA = scores_BTA.softmax(-1)
    action_RA = torch.multinomial(true_BTA.flatten(0, 1), 1, generator=generator)
    return features_BTF, action_RA.view(episodes, steps), true_BTA


def test_the_model_recovers_a_logistic_policy() -> None:
    features_BTF, action_BT, true_BTA = log()
    model = fit_behaviour(features_BTF, action_BT, actions=3, ridge=1e-3)
    assert (model.probabilities(features_BTF) - true_BTA).abs().mean() < 0.015
    one_BTA = cross_fitted_behaviour(features_BTF, action_BT, actions=3, folds=3)
    assert (one_BTA - true_BTA).abs().mean() < 0.02


def test_the_fitted_mean_of_each_action_is_its_frequency() -> None:
    """The law of logistic regression with free constants."""
    features_BTF, action_BT, _ = log(300)
    found_BTA = fit_behaviour(features_BTF, action_BT, actions=3).probabilities(features_BTF)
    shares = action_BT.flatten().bincount(minlength=3) / action_BT.numel()
    assert found_BTA.flatten(0, 1).mean(0).tolist() == pytest.approx(shares.tolist(), abs=1e-4)


def test_forbidden_actions_have_probability_zero_and_padding_is_ignored() -> None:
    features_BTF, action_BT, _ = log(200)
    allowed_BTA = torch.ones(200, 3, 3, dtype=torch.bool)
    allowed_BTA[:, :, 2] = action_BT == 2
    valid_BT = torch.ones(200, 3, dtype=torch.bool)
    valid_BT[:50, 2] = False
    settings: dict[str, Any] = {"actions": 3, "allowed_BTA": allowed_BTA, "valid_BT": valid_BT}
    model = fit_behaviour(features_BTF, action_BT, **settings)
    assert (model.probabilities(features_BTF, allowed_BTA)[~allowed_BTA] == 0).all()
    hostile_BTF = torch.where(valid_BT[..., None], features_BTF, torch.nan)
    assert torch.equal(fit_behaviour(hostile_BTF, action_BT, **settings).weight_AF, model.weight_AF)
    folds_BTA = cross_fitted_behaviour(features_BTF, action_BT, **settings)
    assert torch.allclose(folds_BTA.sum(-1), torch.ones(()).double())


def test_estimated_propensities_give_the_estimate_of_known_ones() -> None:
    features_BTF, action_BT, true_BTA = log()
    target_BTA = true_BTA.flip(-1)
    index_BT1 = action_BT[..., None]
    found = []
    for behaviour_BTA in (true_BTA, fit_behaviour(features_BTF, action_BT, actions=3).probabilities(features_BTF)):
        steps = LoggedSteps(
            reward_BT=(action_BT == 2).double(),
            target_BT=target_BTA.gather(-1, index_BT1)[..., 0],
            propensity_BT=behaviour_BTA.gather(-1, index_BT1)[..., 0],
        )
        config = OffPolicyConfig(least_ess=1.0, most_weight_errors=1e9, resamples=100)
        found.append(next(e for e in deployment(steps, config) if e.name == "pdwis"))
    known, fitted = found
    assert known.low is not None
    assert fitted.value is not None
    assert known.high is not None
    assert known.low < fitted.value < known.high


def test_predictions_of_an_episode_do_not_depend_on_its_actions() -> None:
    features_BTF, action_BT, _ = log(40)
    other_BT = action_BT.clone()
    other_BT[7] = (other_BT[7] + 1) % 3
    found, changed = (cross_fitted_behaviour(features_BTF, x_BT, actions=3, folds=4) for x_BT in (action_BT, other_BT))
    differs_B = (found != changed).flatten(1).any(1)
    assert not differs_B[7]
    assert differs_B.sum() == 30  # the episodes of the other folds


def test_calibration_by_hand() -> None:
    """Two actions at two steps: pairs (0.9, taken), (0.1, not), (0.6, not), (0.4, taken)."""
    probabilities_BTA = torch.tensor([[[0.9, 0.1], [0.6, 0.4]]])
    found = calibration(probabilities_BTA, torch.tensor([[0, 1]]), bins=2)
    low, high = found.bins
    assert (low.count, high.count) == (2, 2)
    assert (low.expected, low.observed) == (pytest.approx(0.25), 0.5)
    assert (high.expected, high.observed) == (pytest.approx(0.75), 0.5)
    assert found.ece == pytest.approx(0.25)
    assert "expected calibration error 0.2500" in str(found)
    single = calibration(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0]]))
    assert single.ece == 0
    assert [b.low for b in single.bins] == [0.0, 0.9]


def test_true_probabilities_are_calibrated_and_others_are_not() -> None:
    features_BTF, action_BT, true_BTA = log()
    assert calibration(true_BTA, action_BT).ece < 0.015
    assert calibration(cross_fitted_behaviour(features_BTF, action_BT, actions=3), action_BT).ece < 0.02
    assert calibration(true_BTA.flip(-1), action_BT).ece > 0.1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"features_BTF": torch.ones(4, 3)}, "features_BTF: expected shape"),
        ({"features_BTF": torch.full((4, 3, 2), torch.nan)}, "expected finite numbers, got nan"),
        ({"action_BT": torch.full((4, 3), 9)}, r"ids must lie in \[0, 3\), got 9"),
        ({"actions": 0}, "actions=0"),
        ({"ridge": 0.0}, "ridge=0.0 must be positive"),
        ({"allowed_BTA": torch.zeros(4, 3, 3, dtype=torch.bool)}, r"action 0 at \(0, 0\) is not allowed"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], sentence: str) -> None:
    good = {"features_BTF": torch.rand(4, 3, 2), "action_BT": torch.zeros(4, 3, dtype=torch.long), "actions": 3}
    with pytest.raises(ValueError, match=sentence):
        fit_behaviour(**{**good, **changes})


def test_wrong_widths_and_probabilities_are_refused() -> None:
    model = fit_behaviour(torch.rand(4, 3, 2), torch.zeros(4, 3, dtype=torch.long), actions=3)
    with pytest.raises(ValueError, match="expected 2 features, got 5"):
        model.probabilities(torch.rand(4, 3, 5))
    with pytest.raises(ValueError, match="must sum to 1"):
        calibration(torch.ones(1, 1, 2), torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="behaviour_BTA: expected shape"):
        calibration(torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="folds=9 must not be more"):
        cross_fitted_behaviour(torch.rand(4, 3, 2), torch.zeros(4, 3, dtype=torch.long), actions=3, folds=9)
