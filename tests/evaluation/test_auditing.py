"""The audit on policies with known results: it finds exactly the channels that each method sees."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import SPECS, build, build_random, random_trajectory, served
from uat.cli import main
from uat.config import override
from uat.domains.darkroom import DarkRoomConfig
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.domains.darkroom.world import DarkRoomSimulator
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.episode import Step
from uat.evaluation.auditing import Audit, difference, divergence, two_decisions
from uat.methods import METHODS
from uat.recipes import recipe
from uat.spec import Discrete, Spec, Vector


def seen(found: Audit) -> set[str]:
    return {channel.channel for channel in found.channels if channel.seen}


@pytest.mark.parametrize("method", METHODS)
def test_the_audit_finds_exactly_the_declared_channels(method: str) -> None:
    """With random weights, methods that declare no feedback are blind to the last bit; the others are not."""
    policy = build_random(method, served(method), dtype=torch.float32)
    found = uat.audit(policy, episodes=6, draws=1)
    assert seen(found) == {"observation", *policy.sees}
    assert found.blind == (not policy.sees) == (found.largest == 0)
    assert found.informative is None
    for channel in found.channels:
        assert 0 <= channel.low <= channel.divergence <= channel.high <= 1
        assert (channel.divergence > 0 or channel.changed > 0) == channel.seen


@pytest.mark.parametrize("spec", ["items-discrete", "assets-weights"])
def test_every_kind_of_problem_is_audited(spec: str) -> None:
    for method, blind in (("vanilla", True), ("uat", False)):
        policy = build_random(method, SPECS[spec], dtype=torch.float32)
        for histories in (None, random_trajectory(SPECS[spec], episodes=5)):
            found = uat.audit(policy, histories, episodes=5, draws=1)
            assert found.blind == blind
    assert found.steps == int(random_trajectory(SPECS[spec], episodes=5).valid.sum())


def test_zero_gates_are_blind_although_the_method_is_not() -> None:
    """A newly initialised UAT computes the same as Vanilla, so the audit must find it blind."""
    policy = build("uat", SPECS["vector-discrete"], dtype=torch.float32)
    found = uat.audit(policy, episodes=4, draws=1)
    assert found.blind
    assert seen(found) == {"observation"}


# ---------------------------------------------------------------- foreign policies


@dataclass
class Copycat:
    """Repeats the previous action with certainty; a plain class without torch, memory or spec."""

    sampled: ClassVar[bool] = False

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return 1e4 * torch.nn.functional.one_hot(step.prev_action.clamp_min(0), 4).float(), None


@dataclass
class Deaf(Copycat):
    """Reacts only to rewards above ten, which never occur."""

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return (step.prev_reward > 10).float()[:, None] * torch.eye(4)[0], None


def test_a_policy_with_two_methods_is_audited_and_divergences_are_known() -> None:
    """Copies one of four uniform actions, so another episode's action differs in 3 of 4 steps, by one bit."""
    spec = Spec(obs=Vector(2), action=Discrete(4), horizon=400)
    found = uat.audit(Copycat(), spec=spec, episodes=40)
    by = {channel.channel: channel for channel in found.channels}
    assert seen(found) == {"action"}
    assert abs(by["action"].divergence - 0.75) < 0.02
    assert by["action"].divergence == pytest.approx(by["action"].changed, abs=1e-6)
    assert by["observation"].divergence == by["reward"].divergence == 0
    with pytest.raises(ValueError, match="spec="):
        uat.audit(Copycat())
    with pytest.raises(ValueError, match="episodes=1"):
        uat.audit(Copycat(), spec=spec, episodes=1)


def test_a_policy_that_can_see_feedback_is_not_blind_without_any() -> None:
    """Random rewards reveal the dependence; the episodes' own rewards do not."""
    found = uat.audit(Deaf(), spec=Spec(obs=Vector(2), action=Discrete(4), horizon=50), episodes=20)
    assert seen(found) == {"reward"}
    assert found.channels[2].divergence == 0


def test_divergence_in_bits_and_decisions_that_differ() -> None:
    sure, other, even = torch.tensor([1e4, 0.0]), torch.tensor([0.0, 1e4]), torch.zeros(2)
    assert divergence(sure, sure).item() == 0
    assert divergence(sure, other).item() == pytest.approx(1.0)
    assert divergence(sure, even).item() == pytest.approx(0.311278, abs=1e-5)  # H(3/4) - 1/2
    masked = torch.tensor([0.0, -torch.inf])
    assert divergence(masked, masked).item() == 0
    assert difference(masked[None, None], masked[None, None]).item() == 0
    cannot = torch.full((2,), torch.nan)
    assert [two_decisions(sure, x).item() for x in (other, even, sure, cannot)] == [True, False, False, False]


# ---------------------------------------------------------------- the process


def test_the_audit_finds_the_dark_room_feedback_informative() -> None:
    room = DarkRoomSimulator(DarkRoomConfig(size=4, horizon=8, num_worlds=2**40), "cpu")
    reference = DarkRoomFilter(room.config)
    for method, apart in (("vanilla", 0.0), ("uat", 1.0)):
        policy = build_random(method, room.spec, dtype=torch.float32)
        found = uat.audit(policy, room, reference=reference, episodes=32)
        assert found.informative
        assert found.witnesses >= 1
        assert found.told_apart == apart
        assert "feedback-informative" in found.sentence()


def test_a_reference_that_reads_whole_episodes_sees_the_exchanged_feedback() -> None:
    """Short episodes, so that the rewards of one are possible in another."""
    domain = MovieLens(MovieLensConfig(horizon=2, delay=0, users=300, items=300))
    for method, apart in (("vanilla", 0.0), ("uat", 1.0)):
        policy = build_random(method, domain.spec, dtype=torch.float32)
        found = uat.audit(policy, domain.simulator("test", "cpu"), reference=domain.references()["ceiling"])
        assert found.informative
        assert found.told_apart == apart


def test_an_empty_channel_gives_equal_outputs(tmp_path: Path, capsys: Any) -> None:
    """`uat audit` on a run under null feedback: the policy can see feedback, but no feedback arrives to change it."""
    settings = {"feedback.reward": "null", "feedback.action": "null", "train.epochs": 2, "domain.horizon": 12}
    run = uat.train(override(recipe("darkroom", "uat", "smoke"), settings), tmp_path / "null", device="cpu")
    main(["audit", str(run.path), "--episodes", "4", "--draws", "1", "--device", "cpu", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["channel"] for row in rows] == ["observation", "action", "reward"]
    assert [row["divergence"] > 0 for row in rows] == [True, False, False]
    assert all(row["informative"] and row["told_apart"] == 0 for row in rows)


ODD: dict[str, Any] = {
    "number": 3,
    "text": "x",
    "lists": [[]],
    "tensor": torch.ones(2),
    "tensor without values": torch.ones(2, device="meta"),
    "class": Spec,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["policy", "histories", "spec", "reference"])
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(name: str, odd: str) -> None:
    given: dict[str, Any] = {"policy": build("uat", SPECS["vector-discrete"]), name: ODD[odd]}
    with pytest.raises(ValueError, match=rf"^audit: {name}=.* must be "):
        uat.audit(**given)


@pytest.mark.parametrize("device", ["mps", "meta", 1.5, "a\0b"])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device.* 'cpu' or 'cuda'"):
        uat.audit(build("uat", SPECS["vector-discrete"]), device=device)
