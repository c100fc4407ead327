"""Playing, in a world so small that every number is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.acting import rollout
from uat.clock import NO_ACTION
from uat.contracts import Agent, Simulator, Transition
from uat.distributions import choose
from uat.episode import Noise, Step
from uat.noise import gumbel
from uat.spec import Discrete, Spec, Vector, Weights

HORIZON, A = 5, 3


@dataclass(frozen=True, slots=True)
class Clockwork:
    t: int
    ends_B: Tensor


class Countdown(Simulator[Clockwork]):
    """World b ends with step ends[b]. One observes the time, and earns ten times the time plus the action.

    After its end a world reports at every second step that it has ended.
    """

    def __init__(self, action: Discrete | Weights, *, masked: bool = False) -> None:
        self.spec = Spec(obs=Vector(1), action=action, horizon=HORIZON)
        self.masked = masked

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"ends": episode_ids % HORIZON}

    def reset(self, noise: Noise) -> tuple[Clockwork, Tensor]:
        world = Clockwork(0, noise["ends"])
        return world, self._observe(world)

    def expert(self, world: Clockwork) -> Tensor:
        best = (world.ends_B + world.t) % A
        return best if isinstance(self.spec.action, Discrete) else torch.nn.functional.one_hot(best, A).float()

    def allowed(self, world: Clockwork) -> Tensor | None:
        """Action 0 is forbidden at odd times."""
        return torch.tensor([world.t % 2 == 0, True, True]).expand(len(world.ends_B), A) if self.masked else None

    def step(self, world: Clockwork, action: Tensor) -> Transition[Clockwork]:
        index = action if isinstance(self.spec.action, Discrete) else action @ torch.arange(A).float()
        after, over_B = Clockwork(world.t + 1, world.ends_B), world.t - world.ends_B
        over_B = (over_B >= 0) & (over_B % 2 == 0)
        return Transition(after, self._observe(after), 10.0 * world.t + index, over_B)

    def facts(self, world: Clockwork) -> dict[str, Tensor]:
        return {"ends": world.ends_B}

    def _observe(self, world: Clockwork) -> Tensor:
        return torch.full((len(world.ends_B), 1), float(world.t))


class Script(Agent[int]):
    """Plays the same logits whatever happens, where they are allowed, and counts its steps in its state."""

    def __init__(self, logits_A: list[float], kind: type[Discrete | Weights] = Discrete) -> None:
        self.spec = Spec(obs=Vector(1), action=kind(A), horizon=HORIZON)
        self.logits_A, self.told = torch.tensor(logits_A), list[Step]()

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> int:
        assert capacity == HORIZON
        return 0

    def step(self, state: int, step: Step) -> tuple[Tensor, int]:
        assert step.first.all() == (state == 0)
        self.told.append(step.map(torch.clone))
        logits_BA = self.logits_A.expand(len(step.obs), A)
        return logits_BA if step.allowed is None else logits_BA.masked_fill(~step.allowed, -torch.inf), state + 1


def play(simulator: Countdown, agent: Any, noise_BTA: Tensor | None = None, episodes: int = HORIZON) -> Any:
    return rollout(agent, simulator, simulator.noise(torch.arange(episodes), seed=0), noise_BTA)


# ---------------------------------------------------------------- choosing


def test_greedy_choice_is_the_arg_max() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, -torch.inf]])
    assert choose(logits, Countdown(Discrete(A)).spec).tolist() == [1, 0]


def test_gumbel_noise_samples_from_the_softmax() -> None:
    draws, logits = 50_000, torch.tensor([0.0, 1.5, -1.0, -torch.inf])
    noise = gumbel(1, "play", torch.arange(draws), 4)
    spec = Spec(obs=Vector(1), action=Discrete(4), horizon=1)
    seen = torch.bincount(choose(logits.expand(draws, 4), spec, noise), minlength=4)
    expected = draws * logits.softmax(0)
    assert seen[3] == 0
    assert ((seen - expected)[:3] ** 2 / expected[:3]).sum() < 14  # 2 degrees of freedom: 0.999


def test_weights_are_the_softmax_with_or_without_noise() -> None:
    logits, spec = torch.tensor([[0.0, 1.0, -torch.inf]]), Countdown(Weights(A)).spec
    weights = choose(logits, spec)
    torch.testing.assert_close(weights, logits.softmax(-1))
    assert weights[0, 2] == 0
    assert torch.equal(choose(logits, spec, torch.ones(1, A)), weights)


# ---------------------------------------------------------------- rollouts


def test_trajectory_by_hand() -> None:
    trajectory = play(Countdown(Discrete(A)), Script([0.0, 0.0, 1.0]))
    assert trajectory.obs[1, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert (trajectory.action == 2).all()
    assert trajectory.reward[3].tolist() == [2, 12, 22, 32, 42]
    assert trajectory.target[1].tolist() == [1, 2, 0, 1, 2]
    assert trajectory.facts["ends"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert trajectory.allowed is None


def test_early_end_leaves_padding() -> None:
    """The world that ends with step e has e + 1 real steps, and ends once."""
    trajectory = play(Countdown(Discrete(A)), Script([0.0, 0.0, 1.0]))
    t, ends = torch.arange(HORIZON), torch.arange(HORIZON)[:, None]
    assert torch.equal(trajectory.valid, t <= ends)
    assert torch.equal(trajectory.done, t == ends)


def test_agent_is_told_the_past_step_by_step() -> None:
    agent = Script([0.0, 1.0, 0.0])
    play(Countdown(Discrete(A)), agent, episodes=1)
    assert [step.prev_action.item() for step in agent.told] == [NO_ACTION, 1, 1, 1, 1]
    assert [step.prev_reward.item() for step in agent.told] == [0, 1, 11, 21, 31]
    assert [step.obs.item() for step in agent.told] == [0, 1, 2, 3, 4]


class Watcher(Script):
    """A reference that looks at what the world hides."""

    def __init__(self, logits_A: list[float]) -> None:
        super().__init__(logits_A)
        self.looked = list[int]()

    def look(self, state: int, facts: dict[str, Tensor]) -> int:
        assert facts["ends"].tolist() == list(range(HORIZON))
        self.looked.append(state)
        return state


def test_a_reference_that_may_looks_at_the_facts_before_every_step() -> None:
    reference = Watcher([0.0, 1.0, 0.0])
    trajectory = play(Countdown(Discrete(A)), reference)
    assert reference.looked == list(range(HORIZON))
    assert torch.equal(trajectory.action, play(Countdown(Discrete(A)), Script([0.0, 1.0, 0.0])).action)


def test_forbidden_actions_are_not_played() -> None:
    noise_BTA = gumbel(2, "play", torch.arange(HORIZON), HORIZON * A).view(HORIZON, HORIZON, A)
    for noise in (None, noise_BTA):
        trajectory = play(Countdown(Discrete(A), masked=True), Script([9.0, 1.0, 0.0]), noise)
        assert (trajectory.action[:, 0::2] == 0).any()
        assert (trajectory.action[:, 1::2] != 0).all()
        assert trajectory.allowed[0, :, 0].tolist() == [True, False, True, False, True]


def test_sampled_play_is_decided_by_the_noise_alone() -> None:
    simulator, agent = Countdown(Discrete(A)), Script([0.0, 0.3, -0.2])
    noise_BTA = gumbel(3, "play", torch.arange(HORIZON), HORIZON * A).view(HORIZON, HORIZON, A)
    once, again = (play(simulator, agent, noise_BTA).action for _ in range(2))
    assert torch.equal(once, again)
    assert torch.equal(once, (agent.logits_A + noise_BTA).argmax(-1))
    assert len(once.unique()) == A


def test_weights_are_played_and_told_as_weights() -> None:
    agent = Script([0.0, 1.0, 2.0], Weights)
    trajectory = play(Countdown(Weights(A), masked=True), agent)
    held = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    torch.testing.assert_close(trajectory.action[0, 0], held)
    assert trajectory.action[0, 1, 0] == 0
    torch.testing.assert_close(trajectory.reward[0, 2], 20 + held @ torch.arange(A).float())
    assert agent.told[0].prev_action.abs().max() == 0
    assert torch.equal(agent.told[1].prev_action, trajectory.action[:, 0])
    assert trajectory.target.shape == trajectory.action.shape


@pytest.mark.parametrize("action", [Discrete(A), Weights(A)])
def test_without_an_agent_the_expert_plays(action: Discrete | Weights) -> None:
    trajectory = play(Countdown(action), None)
    assert torch.equal(trajectory.action, trajectory.target)
    index = trajectory.target if isinstance(action, Discrete) else trajectory.target.argmax(-1)
    assert torch.equal(trajectory.reward, 10.0 * torch.arange(HORIZON) + index)


def test_playing_builds_no_graph() -> None:
    agent = Script([0.0, 1.0, 2.0], Weights)
    agent.logits_A.requires_grad_()
    assert not play(Countdown(Weights(A)), agent).action.requires_grad
