"""From `gymnasium.make` to a policy that adapts: train by PPO, without an expert, then act with a session."""

import gymnasium
import numpy as np

import uat


class Arms(gymnasium.Env):
    """Five arms, of which one pays nine times out of ten; which one is hidden, and changes without a sign."""

    observation_space, action_space = gymnasium.spaces.Box(0.0, 1.0, (1,)), gymnasium.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.best, self.left = self.np_random.integers(5), 80
        return np.ones(1, np.float32), {}

    def step(self, action):
        reward = float(self.np_random.random() < (0.9 if action == self.best else 0.1))
        if self.np_random.random() < 0.04:
            self.best = (self.best + self.np_random.integers(1, 5)) % 5
        self.left -= 1
        return np.ones(1, np.float32), reward, False, self.left == 0, {}


if __name__ == "__main__":
    gymnasium.register("Arms-v0", Arms, max_episode_steps=80)
    env = gymnasium.make("Arms-v0")
    run = uat.train(env, "runs/arms", method="uat", objective="ppo", settings={"train.steps": 300_000})
    session, (obs, _), reward, done, total = uat.Session(uat.load(run.path)), env.reset(seed=1), None, False, 0.0
    while not done:
        action = session.act([obs], reward=None if reward is None else [reward])
        obs, reward, terminated, truncated, _ = env.step(int(action[0]))
        total, done = total + reward, terminated or truncated
    print(f"one episode of 80 steps: {total:.0f} rewards (an arm at random: 21)")
