"""Five mistakes that newcomers make: each is one sentence that says what to do, or simply works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import uat
from tests.builders import SPECS, build_random, random_trajectory

SPEC = SPECS["vector-discrete"]


def one_sentence(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_an_action_that_is_a_vector_is_a_box() -> None:
    with pytest.raises(ValueError, match=r"Spec\.action=Vector\(width=2\) is for observations.* Box") as caught:
        uat.Spec(obs=uat.Vector(3), action=uat.Vector(2), horizon=5)  # pyright: ignore[reportArgumentType]
    one_sentence(caught.value)


def test_a_hole_inside_an_episode_is_named() -> None:
    trajectory = random_trajectory(SPEC)
    trajectory.valid = torch.ones_like(trajectory.valid)
    trajectory.valid[1, 2] = False
    parts = {"obs": trajectory.obs, "action": trajectory.action, "reward": trajectory.reward}
    for act in (
        lambda: uat.episodes(SPEC, **parts, valid=trajectory.valid),
        lambda: uat.corrupt(trajectory, noise=1.0),
        lambda: uat.audit(build_random("vanilla", SPEC), trajectory),
    ):
        with pytest.raises(ValueError, match=r"valid: padding may only follow.* got True after False at \(1, 3\)"):
            act()


class Coin(uat.Simulator[torch.Tensor]):
    """A world of one step, without a recipe."""

    spec = uat.Spec(obs=uat.Vector(1), action=uat.Discrete(2), horizon=2)

    def noise(self, episode_ids: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
        return {"side": episode_ids % 2}

    def reset(self, noise: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return noise["side"], noise["side"][:, None].float()

    def step(self, world: torch.Tensor, action: torch.Tensor) -> uat.Transition[torch.Tensor]:
        never = torch.zeros_like(world, dtype=torch.bool)
        return uat.Transition(world, world[:, None].float(), (action == world).float(), never)

    def expert(self, world: torch.Tensor) -> torch.Tensor | None:
        return world


class Coins(uat.Domain):
    """Coins whose side is seen."""

    name = "coins"
    spec = Coin.spec

    def simulator(self, split: Any, device: torch.device | str) -> Coin:
        return Coin()


def test_a_domain_without_a_recipe_trains_and_is_scored_and_a_second_cell_says_what_to_do(tmp_path: Path) -> None:
    def cell() -> uat.Run:
        """Run a notebook cell, possibly for the second time."""
        return uat.train(Coins(), tmp_path / "run", method="vanilla", preset="smoke", device="cpu")

    run = cell()
    scores = {score.method: score.value for score in uat.evaluate(run).scores if score.metric == "return"}
    assert scores["expert"] == 2.0
    assert scores.keys() == {"vanilla", "expert"}
    with pytest.raises(ValueError, match=r"already holds this run; continue .*resume=True.* out=") as caught:
        cell()
    one_sentence(caught.value)
    with pytest.raises(ValueError, match=r"holds another run .* another folder with --out \(in Python out=") as c:
        uat.train(Coins(), run.path, method="uat", preset="smoke", device="cpu")
    one_sentence(c.value)
    more = uat.train(Coins(), run.path, method="vanilla", preset="smoke", device="cpu", resume=True)
    assert more.rows("metrics.jsonl") == run.rows("metrics.jsonl")


class Hidden(Coin):
    """Has no expert."""

    def expert(self, world: torch.Tensor) -> None:
        return None


class HiddenCoins(Coins):
    """Nothing says what the right side is."""

    def simulator(self, split: Any, device: torch.device | str) -> Coin:
        return Hidden()


@pytest.mark.parametrize("there_before", [False, True])
def test_imitation_without_an_expert_is_refused_and_the_folder_may_be_used_again(
    there_before: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    if there_before:
        folder.mkdir()
    with pytest.raises(ValueError, match="imitation needs an expert's actions") as caught:
        uat.train(HiddenCoins(), folder, method="vanilla", preset="smoke", device="cpu")
    one_sentence(caught.value)
    assert folder.exists() == there_before
    uat.train(Coins(), folder, method="vanilla", preset="smoke", device="cpu")


def test_one_stream_takes_its_reward_as_a_number() -> None:
    policy = build_random("uat", SPEC, dtype=torch.float32)
    obs = [[0.1, 0.2, 0.3, 0.4, 0.5]]
    plain, bare = uat.Session(policy), uat.Session(policy)
    for reward in (None, 1.0, 0.5):
        told = None if reward is None else [reward]
        assert torch.equal(plain.act(obs, reward=reward), bare.act(obs, reward=told))
    with pytest.raises(ValueError, match=r"reward: expected .*2") as caught:
        uat.Session(policy, streams=2).act(obs * 2, reward=1.0)
    one_sentence(caught.value)
