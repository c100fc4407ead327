"""CoTTA: known answers of teacher, student, restoring and jitter, and equality with a slow twin."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.builders import SPECS, build_random, moments, random_batch, stream
from tests.methods import twin
from uat.episode import Batch
from uat.methods.cotta import Cotta, CottaConfig, CottaState
from uat.spec import Spec

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
DISCRETE = SPECS["vector-discrete"]
NEVER = 2.0
"""A certainty above every probability, so that the averaged prediction is always the target."""


def build_cotta(spec: Spec, **settings: Any) -> Cotta:
    policy = build_random("cotta", spec, **settings)
    assert isinstance(policy, Cotta)
    return policy


def played(policy: Cotta, batch: Batch, student: float = 0.0) -> CottaState:
    """The state after a batch, before which all students were shifted by `student`."""
    streams, steps = batch.valid.shape
    state = policy.init_state(streams, steps, "cpu")
    state.student_BP.fill_(student)
    for step in moments(batch):
        step.first.fill_(False)
        _, state = policy.step(state, step)
    return state


@pytest.mark.parametrize("certainty", [NEVER, 0.5])
@every_spec
def test_cotta_equals_its_slow_twin(spec: Spec, certainty: float) -> None:
    policy = build_cotta(
        spec, adaptation_rate=0.3, teacher_decay=0.6, restore_share=0.3, jitter=0.5, certainty=certainty
    )
    batch = random_batch(spec, episodes=1, seed=2)
    expected = twin.cotta(policy, batch)
    torch.testing.assert_close(stream(policy, batch)[0], expected, rtol=0, atol=1e-9)
    unmoved = policy.learner.logits(batch)[0]
    assert (expected - unmoved)[1:].nan_to_num().abs().max() > 0.01


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_cotta_equals_its_slow_twin_under_a_window(positions: str) -> None:
    places: Any = {"positions": positions, "context": 3}
    policy = build_cotta(DISCRETE, adaptation_rate=0.3, teacher_decay=0.6, jitter=0.5, certainty=0.5, **places)
    batch = random_batch(DISCRETE, episodes=1, seed=2)
    torch.testing.assert_close(stream(policy, batch)[0], twin.cotta(policy, batch), rtol=0, atol=1e-9)


@every_spec
def test_layers_move_and_nothing_else(spec: Spec) -> None:
    policy = build_cotta(spec, certainty=NEVER, restore_share=0.0)
    tables = {"positions", "encoder.weight"}
    assert policy.layout.shapes.keys() == {name for name, _ in policy.backbone.named_parameters()} - tables
    state = played(policy, random_batch(spec, whole=True))
    for moved_BP in (state.student_BP, state.teacher_BP):
        for name, shift in policy.layout.views(moved_BP).items():
            assert shift.flatten(1).abs().amax(1).min() > 0, name


def test_the_teacher_is_the_running_average_of_the_student() -> None:
    policy = build_cotta(DISCRETE, adaptation_rate=0.0, restore_share=0.0)
    state = played(policy, random_batch(DISCRETE), student=1.0)
    assert policy.config.teacher_decay == 0.999
    assert torch.equal(state.student_BP, torch.ones_like(state.student_BP))
    torch.testing.assert_close(state.teacher_BP, torch.full_like(state.teacher_BP, 1 - 0.999**7), rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_the_stated_share_is_restored(share: float) -> None:
    policy = build_cotta(DISCRETE, adaptation_rate=0.0, restore_share=share, d_model=48)
    size = sum(policy.layout.sizes)
    state = played(policy, random_batch(DISCRETE, steps=1), student=1.0)
    assert (state.student_BP == 0).sum(1).tolist() == [round(share * size)] * 3  # no weight twice
    assert (state.student_BP + (state.student_BP == 0) == 1).all()  # the others are left alone
    steps = 4000
    times_P = torch.bincount(policy.restored(torch.arange(steps)).flatten(), minlength=size) / steps
    deviation = (share * (1 - share) / steps) ** 0.5
    assert times_P.mean().item() == pytest.approx(share, abs=1e-4)
    assert (times_P - share).abs().max() < 5.5 * deviation  # each of 16,000 weights has its turn as often
    sets = [policy.restored(torch.tensor([t]))[0] for t in range(100)]
    both = [torch.isin(a, b).double().mean().item() for a, b in itertools.pairwise(sets)]
    assert sum(both) / len(both) == pytest.approx(share, rel=0.15)  # a step knows nothing of the one before


def test_restoring_depends_on_step_and_seed_alone() -> None:
    policy, other = (build_cotta(DISCRETE, adaptation_seed=seed, restore_share=0.1) for seed in (0, 1))
    once = policy.restored(torch.tensor([4, 0, 4]))
    assert torch.equal(once[0], once[2])
    assert not torch.equal(once[0], once[1])
    assert torch.equal(once[1:2], policy.restored(torch.tensor([0])))
    assert not torch.equal(once, other.restored(torch.tensor([4, 0, 4])))


def test_jitter_is_the_same_for_a_step() -> None:
    policy = build_cotta(DISCRETE, augmentations=50, jitter=0.3)
    found = policy.jitter(torch.tensor([3, 5, 3]))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert found[:, 0].abs().max() == 0
    assert found[:2, 1:].std().item() == pytest.approx(0.3, rel=0.05)
    assert found[:2, 1:].mean().item() == pytest.approx(0.0, abs=0.03)


def test_certain_teachers_stay_plain() -> None:
    """A student whose target is its own prediction does not move; with jitter it does."""
    batch = random_batch(DISCRETE, whole=True)
    still, moved = (played(build_cotta(DISCRETE, certainty=c), batch) for c in (0.0, NEVER))
    assert still.student_BP.abs().max() < 1e-12
    assert moved.student_BP.abs().max() > 1e-6


@pytest.mark.parametrize(
    "setting",
    [
        {"adaptation_rate": -0.1},
        {"teacher_decay": 1.0},
        {"restore_share": 1.0},
        {"restore_share": -0.1},
        {"certainty": float("nan")},
        {"augmentations": 0},
        {"jitter": -1.0},
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name_and_value(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value} must"):
        CottaConfig(**setting)
