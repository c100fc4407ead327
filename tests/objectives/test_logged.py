"""Objectives that learn from logs: known answers, laws, whole trainings on a log with a hidden regime, and refusals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import ALL_SPECS, build_random, random_trajectory, randomise
from uat.engines import Engine
from uat.episode import Batch, Losses, Trajectory
from uat.methods import Policy
from uat.methods.iql import expectile_loss
from uat.noise import integers, uniform
from uat.objectives import OBJECTIVES
from uat.objectives.advantage import Advantage, AdvantageConfig
from uat.objectives.logged import Clone, CloneConfig, Filtered, FilteredConfig, LogObjective, best_share
from uat.objectives.returns import with_last_observation
from uat.training.validation import loss_criterion

LEARNERS = ("vanilla", "gtrxl", "uat", "uat-late", "adt", "adt-prev", "dpt", "dt", "dt-actions")
PLAIN = AdvantageConfig(critic_weight=1.0)
KINDS: dict[str, tuple[type[LogObjective], Any]] = {
    "clone": (Clone, CloneConfig()),
    "filtered": (Filtered, FilteredConfig(share=0.5)),
    "filtered-steps": (Filtered, FilteredConfig(share=0.5, by="step", discount=0.5)),
    "advantage": (Advantage, PLAIN),
    "advantage-positive": (Advantage, replace(PLAIN, weighting="positive", discount=0.0)),
}


def objective_of(kind: str, method: str = "uat", spec: str = "vector-discrete") -> Any:
    build, config = KINDS[kind]
    objective = build(build_random(method, ALL_SPECS[spec], seed=1), config)
    if objective.modules is not None:
        randomise(objective.modules, 2)
    return objective


def recorded(policy: Policy, episodes: int = 6, *, final: bool = True) -> Trajectory:
    """Return random episodes in double precision; every second one was cut off, and some rewards are unknown."""
    played = random_trajectory(policy.spec, episodes=episodes)
    cut_B1 = (torch.arange(episodes) % 2 == 0)[:, None]
    generator = torch.Generator().manual_seed(3)
    played = replace(
        played,
        terminated=played.terminated & ~cut_B1,
        truncated=played.terminated & cut_B1,
        final_obs=random_trajectory(policy.spec, episodes=episodes, seed=9).obs[:, 0] if final else None,
        reward_known=torch.rand(played.valid.shape, generator=generator) < 0.8,
        target=None,
    )
    return played.map(lambda x: x.double() if x.is_floating_point() else x)


def losses_of(objective: Any, episodes: Trajectory) -> Losses:
    return objective.loss(objective.policy.spec.clock.batch(episodes))


def same(one: Losses, other: Losses) -> bool:
    pairs = [(one[name], other[name]) for name in one]
    return one.keys() == other.keys() and all(torch.equal(a, b) and torch.equal(m, n) for (a, m), (b, n) in pairs)


# ---------------------------------------------------------------- known answers


def test_the_expectile_minimises_its_loss() -> None:
    """Of the numbers 0 and 1, half each, the τ-expectile is τ; one half gives the mean."""
    values = torch.tensor([0.0, 1.0], dtype=torch.float64)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    for expectile in (0.5, 0.7, 0.9):
        mean_loss = expectile_loss(values[:, None] - grid, expectile).mean(0)
        assert grid[mean_loss.argmin()].item() == pytest.approx(expectile, abs=1e-3)


def test_best_shares_by_hand() -> None:
    score = torch.tensor([3.0, 9.0, 1.0, 9.0, 5.0])
    counted = torch.tensor([True, True, True, True, False])
    assert best_share(score, counted, 0.5).tolist() == [False, True, False, True, False]
    assert best_share(score, counted, 0.25).tolist() == [False, True, False, True, False]  # both tie
    assert best_share(score, counted, 0.01).tolist() == [False, True, False, True, False]  # at least one
    assert best_share(score, counted, 1.0).tolist() == [True, True, True, True, False]
    assert best_share(score, torch.zeros(5, dtype=torch.bool), 0.5).tolist() == [False] * 5


def test_the_best_episodes_and_steps_are_kept() -> None:
    objective = objective_of("filtered")
    played = random_trajectory(objective.policy.spec, episodes=2, steps=3, whole=True)
    played = replace(played, reward=torch.tensor([[1.0, 0.0, 4.0], [2.0, 2.0, 0.0]]))
    assert objective.kept(played).tolist() == [[True] * 3, [False] * 3]
    unknown = replace(played, reward_known=torch.tensor([[True, True, False], [True, True, True]]))
    assert objective.kept(unknown).tolist() == [[False] * 3, [True] * 3]  # the mean, 1, stands for the unknown 4
    steps = Filtered(objective.policy, FilteredConfig(share=0.34, by="step", discount=0.5))
    assert steps.kept(played).tolist() == [[False, False, True], [True, False, False]]  # of 2, 2, 4 and 3, 2, 0
    assert Filtered(objective.policy, FilteredConfig(share=0.34, by="step")).kept(played).sum() == 4


class Table(uat.Policy):
    """Logits of the actions, and nothing else."""

    def __init__(self, spec: uat.Spec, config: Any = None) -> None:
        from uat.nn.heads import build_head

        super().__init__(spec, config)
        self.head = build_head(spec, 1)

    def features(self, batch: Batch) -> Tensor:
        return torch.ones(*batch.valid.shape, 1, dtype=self.head.linear.weight.dtype)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        raise NotImplementedError

    def step(self, state: Any, step: uat.Step) -> Any:
        raise NotImplementedError


def two_arms() -> Trajectory:
    """A log that takes arm 0 in three of four steps; arm 0 pays 0.2 and arm 1 pays 0.6, always."""
    action = torch.tensor([[0, 0, 0, 1]]).repeat(4, 1)
    ends = torch.arange(4) == 3
    return Trajectory(
        obs=torch.ones(4, 4, 1, dtype=torch.float64),
        action=action,
        reward=torch.where(action == 0, 0.2, 0.6).double(),
        terminated=ends.expand(4, 4),
        valid=torch.ones(4, 4, dtype=torch.bool),
    )


def fitted(config: AdvantageConfig) -> tuple[Advantage, Tensor]:
    """Return the objective after learning from two arms, and its probabilities of both."""
    torch.manual_seed(0)
    policy = Table(uat.Spec(obs=uat.Vector(1), action=uat.Discrete(2), horizon=4)).double()
    objective = Advantage(policy, config)
    batch = policy.spec.clock.batch(two_arms())
    optimizer = torch.optim.LBFGS([*policy.parameters(), *objective.critic.parameters()], max_iter=40)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([total / count for total, count in objective.loss(batch).values()]).sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return objective, policy.logits(batch)[0, 0].softmax(-1).detach()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_two_arms_give_the_exponentially_tilted_policy(share: float) -> None:
    """π(a) ∝ b(a) exp(β A(a)): with b = (3/4, 1/4) and β (0.6 - 0.2) = log 9, 3 : 9."""
    beta = math.log(9) / 0.4
    objective, policy_A = fitted(AdvantageConfig(discount=0.0, temperature=beta, expectile=0.5, return_share=share))
    assert policy_A.tolist() == pytest.approx([0.25, 0.75], abs=1e-3)
    h = torch.ones(1, 1, 1, dtype=torch.float64)
    values = objective.critic.action_values(h.expand(1, 2, 1), torch.tensor([[0, 1]]))
    assert values[0].tolist() == pytest.approx([0.2, 0.6], abs=1e-3)
    assert objective.critic.values(h).item() == pytest.approx(0.75 * 0.2 + 0.25 * 0.6, abs=1e-3)


def test_two_arms_filtered_by_advantage_give_the_better_arm() -> None:
    _, policy_A = fitted(AdvantageConfig(discount=0.0, weighting="positive", expectile=0.5))
    assert policy_A[1] > 0.98


def test_a_high_expectile_is_near_the_better_arm() -> None:
    """The τ-expectile v of 0.2 (weight 3) and 0.6 (weight 1): 3 (1 - τ) (v - 0.2) = τ (0.6 - v)."""
    objective, _ = fitted(AdvantageConfig(discount=0.0, expectile=0.9))
    value = objective.critic.values(torch.ones(1, 1, 1, dtype=torch.float64)).item()
    assert value == pytest.approx((0.9 * 0.6 + 0.3 * 0.2) / 1.2, abs=1e-3)


def reference_targets(objective: Advantage, played: Trajectory, value_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets by a loop over episodes and steps; NaN where they are unknown."""
    c, scale = objective.config, objective.policy.spec.reward_scale
    target_BT, known = torch.full(played.valid.shape, math.nan, dtype=torch.float64), played.reward_known
    for row in range(len(played.valid)):
        later = math.nan
        length = int(played.valid[row].sum())
        for t in reversed(range(length)):
            after = 0.0 if played.terminated[row, t] else float(value_BS[row, t + 1])
            mixed = after if math.isnan(later) else (1 - c.decay) * after + c.decay * later
            unheard = known is not None and not known[row, t]
            lost = t == length - 1 and not played.terminated[row, t] and played.final_obs is None
            later = math.nan if unheard or lost else float(played.reward[row, t]) * scale + c.discount * mixed
            target_BT[row, t] = later
    return target_BT, ~target_BT.isnan()


@pytest.mark.parametrize("final", [True, False])
def test_targets_equal_a_plain_reference(final: bool) -> None:
    objective = objective_of("advantage", spec="assets-discrete")
    played = recorded(objective.policy, final=final)
    value_BS = torch.randn(
        6, played.valid.shape[1] + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected_BT, known_BT = reference_targets(objective, played, value_BS)
    own_BT, own_known_BT = objective.targets(played, value_BS, objective.config.decay)
    assert torch.equal(own_known_BT, known_BT)
    assert (own_BT - expected_BT)[known_BT].abs().max() < 1e-12


def test_a_cut_without_a_last_observation_is_left_out() -> None:
    objective = objective_of("advantage")
    played = recorded(objective.policy, final=False)
    assert played.truncated is not None
    value_BS = torch.zeros_like(played.reward)
    for config, left_out in ((PLAIN, True), (replace(PLAIN, discount=0.0), False)):
        own = Advantage(objective.policy, config)
        _, known_BT = own.targets(replace(played, reward_known=None), value_BS, 0.5)
        assert bool(known_BT[played.truncated].any()) != left_out


@pytest.mark.parametrize("spec", ["vector-discrete", "vector-box"])
def test_losses_equal_the_equations(spec: str) -> None:
    objective = objective_of("advantage", spec=spec)
    played = recorded(objective.policy)
    policy, c = objective.policy, objective.config
    losses, batch = losses_of(objective, played), policy.spec.clock.batch(played)
    longer = policy.spec.clock.batch(with_last_observation(played))
    h_BSD, valid_BT = policy.features(longer), played.valid
    value_BS = objective.critic.value(h_BSD)[..., 0]
    value_BT, (target_BT, known_BT) = value_BS[:, :-1], reference_targets(objective, played, value_BS.detach())
    log_prob_BT = policy.distribution(policy.logits(batch)).log_prob(played.action)
    if spec == "vector-box":
        gain_BT, mixed_BT, valid_BT = target_BT - value_BT, target_BT - value_BT, known_BT
    else:
        worth_BT = objective.critic.action_value(h_BSD[:, :-1]).gather(-1, played.action[..., None])[..., 0]
        critic = (target_BT - worth_BT)[known_BT].square().mean()
        assert (losses["critic"][0] / losses["critic"][1] - critic).abs() < 1e-10
        gain_BT = worth_BT - value_BT
        mixed_BT = torch.where(known_BT, c.return_share * target_BT + (1 - c.return_share) * worth_BT, worth_BT)
        mixed_BT = mixed_BT - value_BT
    weight_BT = (c.temperature * mixed_BT).exp().clamp_max(c.largest_weight)[valid_BT]
    policy_loss = -(weight_BT * log_prob_BT[valid_BT]).sum() / weight_BT.sum()
    value = ((gain_BT < 0).double() - c.expectile).abs() * gain_BT.square()
    assert (losses["policy"][0] / losses["policy"][1] - policy_loss).abs() < 1e-10
    assert (losses["value"][0] / losses["value"][1] - value[valid_BT].mean()).abs() < 1e-10


# ---------------------------------------------------------------- laws


def test_filtering_with_a_share_of_one_is_cloning() -> None:
    clone = objective_of("clone")
    played = recorded(clone.policy)
    (expected,) = losses_of(clone, played).values()
    for by in ("episode", "step"):
        (own,) = losses_of(Filtered(clone.policy, FilteredConfig(share=1.0, by=by)), played).values()
        assert torch.equal(own[0], expected[0])
        assert torch.equal(own[1], expected[1])


def test_advantages_with_a_temperature_of_zero_are_cloning() -> None:
    clone = objective_of("clone")
    played = recorded(clone.policy)
    (expected,) = losses_of(clone, played).values()
    own = losses_of(Advantage(clone.policy, replace(PLAIN, temperature=0.0)), played)["policy"]
    assert torch.equal(own[0], expected[0])
    assert own[1] == expected[1]


def test_cloning_is_the_imitation_of_an_expert_who_did_what_was_logged() -> None:
    clone = objective_of("clone")
    played = recorded(clone.policy)
    shown = replace(played, target=torch.where(played.valid, played.action, -1))
    (own,), (theirs,) = (
        losses_of(clone, played).values(),
        clone.policy.loss(clone.policy.spec.clock.batch(shown)).values(),
    )
    assert torch.equal(own[0], theirs[0])


@pytest.mark.parametrize("spec", ["vector-discrete", "vector-box"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str, spec: str) -> None:
    objective = objective_of(kind, spec=spec)
    played = recorded(objective.policy)
    other = replace(
        played,
        reward=torch.where(played.valid, played.reward, math.nan),
        obs=torch.where(played.valid[..., None], played.obs, math.nan),
        reward_known=played.reward_known | ~played.valid if played.reward_known is not None else None,
        action=torch.where(played.valid, played.action, -1) if spec == "vector-discrete" else played.action,
    )
    assert same(losses_of(objective, played), losses_of(objective, other))


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_rewards_change_nothing(kind: str) -> None:
    objective = objective_of(kind)
    played = recorded(objective.policy)
    assert played.reward_known is not None
    other = replace(played, reward=torch.where(played.reward_known, played.reward, math.nan))
    assert same(losses_of(objective, played), losses_of(objective, other))


def test_an_action_and_its_reward_do_not_change_the_critics_view_before_them() -> None:
    """Only later steps may know a_t and r_t; V(h_t) and Q(h_t, .) of step t do not."""
    objective = objective_of("advantage", "uat-late")
    played = replace(recorded(objective.policy), reward_known=None)
    other = replace(played, reward=played.reward.clone(), action=played.action.clone())
    other.reward[:, 3], other.action[:, 3] = 9.0, (other.action[:, 3] + 1) % 4
    views = [objective._read(objective.policy.spec.clock.batch(x))[1] for x in (played, other)]
    assert torch.equal(views[0][:, :4], views[1][:, :4])
    assert not torch.equal(views[0][0, 4:], views[1][0, 4:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_logged_action_that_is_not_allowed_is_left_out(kind: str) -> None:
    objective = objective_of(kind)
    played = recorded(objective.policy)
    allowed = torch.ones(*played.valid.shape, 4, dtype=torch.bool)
    allowed[0, 0, int(played.action[0, 0])] = False
    free, masked = losses_of(objective, played), losses_of(objective, replace(played, allowed=allowed))
    assert all(total.isfinite() for total, _ in masked.values())
    if kind == "clone":
        assert free["clone"][1] - masked["clone"][1] == 1


@pytest.mark.parametrize("method", LEARNERS)
@pytest.mark.parametrize("kind", ["clone", "advantage"])
def test_the_loss_reaches_every_parameter(kind: str, method: str) -> None:
    objective = objective_of(kind, method)
    weights = dict(objective.policy.named_parameters())
    if objective.modules is not None:
        weights |= {f"critic.{name}": p for name, p in objective.modules.named_parameters()}
    torch.stack([total for total, _ in losses_of(objective, recorded(objective.policy)).values()]).sum().backward()
    rows = {name: p.grad for name, p in weights.items()}
    assert [name for name, grad in rows.items() if grad is None or not grad.abs().max() > 0] == []


# ---------------------------------------------------------------- whole trainings


class Log(uat.Recording):
    """Each episode's good arm is hidden; the log takes arm 0 in six of ten steps, and any arm in the others."""

    spec = uat.Spec(obs=uat.Vector(1), action=uat.Discrete(3), horizon=8)

    def noise(self, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        regime = integers(seed, "regime", episode_ids, 1, below=3)
        shown = {name: uniform(seed, name, episode_ids, 8) for name in ("explore", "pay")}
        return {"regime": regime, "arm": integers(seed, "arm", episode_ids, 8, below=3), **shown}

    def trajectory(self, noise: dict[str, Tensor]) -> Trajectory:
        action = torch.where(noise["explore"] < 0.6, 0, noise["arm"])
        good = noise["regime"].expand_as(action)
        return Trajectory(
            obs=torch.ones(*action.shape, 1),
            action=action,
            reward=(noise["pay"] < torch.where(action == good, 0.95, 0.05)).float(),
            terminated=(torch.arange(8) == 7).expand_as(action),
            valid=torch.ones_like(action, dtype=torch.bool),
            facts={"good": good},
        )

    def judged(self, trajectory: Trajectory, noise: dict[str, Tensor], answers: Any) -> Trajectory:
        raise AssertionError("training from a log asks for no answers")


class HiddenArm(uat.Domain):
    """A log of pulls, in which the best arm is hidden."""

    name, spec = "hidden-arm", Log.spec

    def simulator(self, split: str, device: torch.device | str) -> Log:
        return Log()


QUICK = {
    "train.epochs": 120,
    "train.lr": 1e-2,
    "train.utility_lr": 2e-2,
    "train.batch_size": 64,
    "train.validate_every": 20,
    "train.validation_episodes": 64,
}


def agreement(run: uat.Run) -> float:
    """Return how often the greedy action is the good arm, from the third step on, given new logged histories."""
    policy, recording = uat.load(run.path).eval(), Log()
    episodes = recording.trajectory(recording.noise(torch.arange(300), 99))
    with torch.no_grad():
        chosen_BT = policy.logits(policy.spec.clock.batch(episodes)).argmax(-1)
    return (chosen_BT == episodes.facts["good"])[:, 2:].float().mean().item()


def test_advantages_find_the_hidden_arm_and_cloning_does_not(tmp_path: Path) -> None:
    found = {}
    for name, own in {"advantage": {"objective.discount": 0.0}, "clone": {"train.epochs": 20}}.items():
        settings = {**QUICK, **own}
        run = uat.train(HiddenArm(), tmp_path / name, method="uat", preset="smoke", objective=name, settings=settings)
        found[name] = agreement(run)
        assert "validation/loss" in run.rows("metrics.jsonl")[-1]
    assert found["clone"] < 0.45
    assert found["advantage"] > found["clone"] + 0.2


def test_an_interrupted_training_resumes_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from uat.training import checkpoint
    from uat.training.epoch import Epoch

    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 0.0)
    how: dict[str, Any] = {"method": "uat", "preset": "smoke", "objective": "advantage"}
    how["settings"] = {**QUICK, "train.epochs": 6, "train.validate_every": 2, "train.batch_size": 8}
    whole = uat.train(HiddenArm(), tmp_path / "whole", **how)
    run, begun = Epoch.run, []

    def crashing(self: Epoch, index: int, *rest: Any) -> Any:
        begun.append(index)
        if index == 4:
            raise KeyboardInterrupt
        return run(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Epoch, "run", crashing)
        with pytest.raises(KeyboardInterrupt):
            uat.train(HiddenArm(), tmp_path / "part", **how)
    part = uat.train(HiddenArm(), tmp_path / "part", **how, resume=True)
    assert begun[-1] == 4
    for name in ("metrics.jsonl", "policy.safetensors", "state/train.safetensors"):
        assert whole.file(name).read_bytes() == part.file(name).read_bytes(), name
    tensors = uat.load(whole.path).state_dict()
    assert not any("critic" in name or "value" in name for name in tensors)


def test_the_page_trains_from_a_log_as_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = "import torch\ntorch.manual_seed(0)\n" + block.replace("runs/pulls", str(tmp_path / "run"))
    seen: dict[str, Any] = {"__name__": "pulls"}
    exec(compile(program, "objectives.md", "exec"), seen)
    episodes, policy = seen["Pulls"](slice(500, 600)).log, uat.load(seen["run"].path).eval()
    with torch.no_grad():
        chosen_BT = policy.logits(policy.spec.clock.batch(episodes)).argmax(-1)
    assert (chosen_BT == seen["arm"][500:])[:, 4:].float().mean() > 0.6
    assert seen["session"].act([[1.0]]).shape == (1,)


# ---------------------------------------------------------------- settings and refusals


@pytest.mark.parametrize("objective", ["clone", "filtered", "advantage"])
def test_worlds_that_are_played_are_refused(objective: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"objective '{objective}' does not fit uat on darkroom: .* are played: take ppo"
    ):
        uat.train("darkroom", tmp_path / "run", method="uat", preset="smoke", objective=objective)
    assert not (tmp_path / "run" / "policy.safetensors").exists()


@pytest.mark.parametrize("build", [Clone, Filtered, Advantage])
def test_methods_that_define_their_own_training_are_refused(build: type[LogObjective]) -> None:
    policy = build_random("iql", ALL_SPECS["vector-discrete"])
    assert "IQL defines its own training" in (build.unsupported_reason(policy, Log(), None) or "")


@pytest.mark.parametrize("build", [Clone, Filtered, Advantage])
def test_weights_are_refused(build: type[LogObjective]) -> None:
    policy = build_random("uat", ALL_SPECS["vector-weights"])
    reason = build.unsupported_reason(policy, Log(), None)
    assert reason is not None
    assert "divide one whole" in reason
    assert build.unsupported_reason(build_random("uat", ALL_SPECS["vector-box"]), Log(), None) is None


def test_rewards_that_precede_their_action_are_refused() -> None:
    policy = build_random("uat", replace(ALL_SPECS["vector-discrete"], reward_lag=0))
    assert "reward_lag=0" in (Advantage.unsupported_reason(policy, Log(), PLAIN) or "")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"objective.share": 0.0}, r"objective.share=0.0 must lie in \(0, 1\]"),
        ({"objective.by": "day"}, "objective.by='day' must be one of 'episode', 'step'"),
        ({"objective.expectile": 1.0}, r"objective.expectile=1.0 must lie in \(0, 1\)"),
        ({"objective.weighting": "linear"}, "objective.weighting='linear' must be one of"),
        ({"objective.temperature": -1.0}, "objective.temperature=-1.0 must not be negative"),
        ({"objective.tau": 0.5}, "unknown setting 'objective.tau'"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], why: str) -> None:
    filters = settings.keys() & {"objective.share", "objective.by"}
    config = uat.recipe("darkroom", "uat", "smoke", objective="filtered" if filters else "advantage")
    with pytest.raises(ValueError, match=why):
        uat.override(config, settings)


def test_a_batch_without_its_episodes_is_refused() -> None:
    objective = objective_of("clone")
    batch = replace(objective.policy.spec.clock.batch(recorded(objective.policy)), trajectory=None)
    with pytest.raises(ValueError, match="this batch has no trajectory"):
        objective.loss(batch)


def test_advantages_select_weights_by_the_critics_error_on_returns() -> None:
    objective = objective_of("advantage")
    policy, played = objective.policy, recorded(objective.policy)
    (phase,) = objective.phases()
    number = loss_criterion(Engine(policy), phase, lambda: played).numbers()["loss"]
    h_BSD = policy.features(policy.spec.clock.batch(with_last_observation(played)))
    returns = Advantage(policy, replace(PLAIN, decay=1.0))
    target_BT, known_BT = reference_targets(returns, played, objective.critic.values(h_BSD).detach())
    worth_BT = objective.critic.action_values(h_BSD[:, :-1], played.action)
    assert number.item() == pytest.approx((target_BT - worth_BT)[known_BT].square().mean().item())


def test_the_best_weights_are_those_of_the_lowest_loss() -> None:
    for name in ("clone", "filtered", "advantage"):
        metric = OBJECTIVES[name].build.criterion(HiddenArm().metrics)
        assert (metric.name, metric.higher_is_better) == ("loss", False)
