"""TENT: it lowers entropy by changing only norms, and equals a slow twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.builders import SPECS, build_random, moments, random_batch, stream
from tests.methods import twin
from uat.methods.adapting import cross_entropy, entropy
from uat.methods.tent import Tent, TentConfig
from uat.nn.shifted import ShiftedStep
from uat.spec import Spec

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
DISCRETE = SPECS["vector-discrete"]


def build_tent(spec: Spec, **settings: Any) -> Tent:
    policy = build_random("tent", spec, **settings)
    assert isinstance(policy, Tent)
    return policy


@pytest.mark.parametrize(
    ("spec", "places"),
    [(spec, {}) for spec in SPECS.values()]
    + [(DISCRETE, {"positions": kind, "context": context}) for kind, context in (("rotary", 3), ("none", 2))],
    ids=[*SPECS, "rotary", "none"],
)
def test_tent_equals_its_slow_twin(spec: Spec, places: dict[str, Any]) -> None:
    policy = build_tent(spec, adaptation_rate=0.05, **places)
    for seed in range(3):
        batch = random_batch(spec, episodes=1, seed=seed)
        expected, unmoved = twin.tent(policy, batch), policy.learner.logits(batch)[0]
        torch.testing.assert_close(stream(policy, batch)[0], expected, rtol=0, atol=1e-9)
        assert (expected - unmoved)[1:].nan_to_num().abs().max() > 0.01


def test_norms_move_and_nothing_else() -> None:
    policy = build_tent(DISCRETE)
    norms = {name for name, p in policy.backbone.named_parameters() if "norm" in name}
    assert policy.layout.shapes.keys() == norms
    assert len(norms) == 2 * (2 + 2 * policy.config.num_layers)
    batch = random_batch(DISCRETE, whole=True)
    state = policy.init_state(3, 7, "cpu")
    for step in moments(batch):
        _, state = policy.step(state, step)
    for name, shift in policy.layout.views(state.shift_BP).items():
        assert shift.abs().amax(1).min() > 0, name


@every_spec
def test_one_step_lowers_the_entropy_of_the_same_input(spec: Spec) -> None:
    policy, batch = build_tent(spec), random_batch(spec, episodes=16, whole=True, masked=False)
    state = policy.init_state(16, 7, "cpu")
    for t, step in enumerate(moments(batch)):
        before = state.shift_BP.clone()
        _, state = policy.step(state, step)
        heights = []
        for shift_BP in (before, state.shift_BP):
            state.cache.length_B.fill_(t)
            forward = ShiftedStep(policy.backbone, policy.layout.views(shift_BP))
            with torch.no_grad():
                h_BD = forward(step.obs, state.position_B, state.cache)[:, 0]
            heights.append(entropy(policy.head.logits(h_BD)))
        if t == 0:  # later updates include momentum of earlier steps
            assert (heights[1] < heights[0]).all()
        assert heights[1].mean() < heights[0].mean()


def test_entropy_is_the_known_one_and_masks_add_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf, 0.0], [5.0, -torch.inf, -torch.inf, -torch.inf]]).requires_grad_()
    found = entropy(logits)
    torch.testing.assert_close(found, torch.tensor([torch.tensor(3.0).log(), 0.0]))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.isfinite().all()
    assert cross_entropy(torch.tensor([[1.0, 0, 0, 0]]), logits[:1]).item() == pytest.approx(torch.tensor(3.0).log())


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf")])
def test_a_bad_rate_is_refused_by_name_and_value(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"adaptation_rate={rate}"):
        TentConfig(adaptation_rate=rate)
