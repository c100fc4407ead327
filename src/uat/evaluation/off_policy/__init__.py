"""Off-policy estimates: the worth of a policy, from episodes that another policy recorded."""

from uat.evaluation.off_policy.behaviour import (
    BehaviourModel,
    Calibration,
    calibration,
    cross_fitted_behaviour,
    fit_behaviour,
)
from uat.evaluation.off_policy.estimates import (
    Estimate,
    OffPolicyConfig,
    as_table,
    behaviour_mean,
    deployment,
    one_step,
)
from uat.evaluation.off_policy.replay import accepted_events, replay_estimate
from uat.evaluation.off_policy.steps import LoggedSteps, logged_steps
from uat.evaluation.off_policy.target import action_probabilities
from uat.evaluation.off_policy.values import Values, fit_rewards, fit_values

__all__ = [
    "BehaviourModel",
    "Calibration",
    "Estimate",
    "LoggedSteps",
    "OffPolicyConfig",
    "Values",
    "accepted_events",
    "action_probabilities",
    "as_table",
    "behaviour_mean",
    "calibration",
    "cross_fitted_behaviour",
    "deployment",
    "fit_behaviour",
    "fit_rewards",
    "fit_values",
    "logged_steps",
    "one_step",
    "replay_estimate",
]
