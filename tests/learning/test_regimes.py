"""A regime that only feedback reveals, in a plain Gymnasium environment, learned by PPO without an expert.

One of five arms pays nine times out of ten, the others once; which one changes without a sign. A Bayes filter that
knows these numbers and pulls the most likely arm is the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import uat
from uat.adapters.gymnasium import domain
from uat.domains import split_seed

ARMS, STEPS, PAYS, CHANGES = 5, 80, 0.9, 0.04
EPISODES = 128


class Arms(gymnasium.Env[Any, Any]):
    observation_space: Any = spaces.Box(0.0, 1.0, (1,))
    action_space: Any = spaces.Discrete(ARMS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.best, self.t = int(self.np_random.integers(ARMS)), 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self.np_random.random() < (PAYS if action == self.best else 1 - PAYS))
        if self.np_random.random() < CHANGES:
            self.best = (self.best + int(self.np_random.integers(1, ARMS))) % ARMS
        self.t += 1
        return np.ones(1, np.float32), reward, False, self.t == STEPS, {}


def filtered() -> float:
    """Return what the Bayes filter earns on the test episodes, on average."""
    worlds = domain(Arms).simulator("test", "cpu")
    seeds, env, total = worlds.noise(torch.arange(EPISODES), split_seed("test", 0))["seed"], Arms(), 0.0
    for seed in seeds.tolist():
        env.reset(seed=seed)
        p_A, done = np.full(ARMS, 1 / ARMS), False
        while not done:
            action = int(p_A.argmax())
            _, reward, _, done, _ = env.step(action)
            p_A = p_A * np.where(np.arange(ARMS) == action, PAYS if reward else 1 - PAYS, 1 - PAYS if reward else PAYS)
            p_A /= p_A.sum()
            p_A = p_A * (1 - CHANGES) + (1 - p_A) * CHANGES / (ARMS - 1)
            total += reward
    return total / EPISODES


@pytest.mark.slow
def test_ppo_earns_nine_tenths_of_what_a_bayes_filter_earns(tmp_path: Path) -> None:
    earned = {}
    for method, steps in (("uat-late", 320_000), ("vanilla", 50_000)):
        settings = {"train.steps": steps, "objective.discount": 0.9, "domain.max_steps": STEPS}
        run = uat.train(Arms, tmp_path / method, method=method, settings=settings)
        scores = uat.evaluate(run, episodes=EPISODES, domain=Arms).scores
        earned |= {s.method: s.value for s in scores if s.metric == "return"}
    best = filtered()
    assert earned["uat-late"] > 0.9 * best
    assert earned["vanilla"] < 0.5 * best  # one arm forever, or any arm, earns 0.26 a step
