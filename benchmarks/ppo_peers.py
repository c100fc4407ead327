"""Train PPO of this library and of its peers on the same environments with the same number of steps, and compare them.

    python benchmarks/ppo_peers.py                      # every missing row, one after another; then the table
    python benchmarks/ppo_peers.py --seeds 0 --players recurrent-ppo uat-late
    python benchmarks/ppo_peers.py --table              # the table alone
    python benchmarks/ppo_peers.py --smoke              # every player for a few hundred steps, in a temporary folder

Every finished training is one row of results/ppo_peers.jsonl; a repeated command skips rows that exist. Players take
turns within a seed, so that other work on the machine slows all of them, and each has one torch thread.

  recurrent-ppo   RecurrentPPO of sb3-contrib, with the settings that rl_zoo3 tuned for the environment (ppo_lstm.yml)
  ppo-stack       PPO of stable-baselines3 on the last four observations, with the settings that rl_zoo3 tuned for the
                  environment with velocities (ppo.yml), and normalised as in ppo_lstm.yml
  any other name  a method of this library by `uat.train(..., objective="ppo")`, with the settings in SETTINGS

rl_zoo3 has no settings for popgym. There both peers take their library's defaults with eight environments, and see the
previous action beside the observation, as the baselines of popgym do.

All weights are those after the last step, and all are scored in the same way: greedily, in episodes that start with
`env.reset(seed=...)` with the same seeds for all. Time is that of the whole training. CPU seconds depend less on other
work on the machine than wall time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import uat
from uat.config import lookup
from uat.evaluation.intervals import Spread
from uat.files import read_rows, row_lines, write_atomically
from uat.methods import METHODS
from uat.objectives import OBJECTIVES
from uat.terminal import say
from uat.threads import cpu_threads

ROWS = Path(__file__).parent / "results" / "ppo_peers.jsonl"
FIRST_SEED = 1_000_000
"""Seed of the first episode of the evaluation; no training uses it or those that follow."""
POINTS = 20
"""Points of a learning curve."""
STACKED = 4
"""Observations that ppo-stack sees at a time."""
PEERS = {"recurrent-ppo": "ppo_lstm.yml", "ppo-stack": "ppo.yml"}
"""Player -> file of rl_zoo3 with its settings."""
PLAYERS = ("recurrent-ppo", "uat-late", "ppo-stack", "vanilla")
NEVER = 1_000_000
"""Epochs between validations, which take steps of their own and select weights: none before the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An environment, and where it comes from."""

    id: str
    package: str
    """Module whose import registers the id."""
    settings_of: Mapping[str, str]
    """Peer -> name of the environment in rl_zoo3's file of settings; empty: it has none."""

    @property
    def name(self) -> str:
        """Name of the domain."""
        return f"gym:{self.package}:{self.id}"

    def make(self) -> Any:
        importlib.import_module(self.package)
        return importlib.import_module("gymnasium").make(self.id, disable_env_checker=True)


def _no_velocities(name: str, version: str) -> Problem:
    tuned = {"recurrent-ppo": f"{name}NoVel-{version}", "ppo-stack": f"{name}-{version}"}
    return Problem(id=f"{name}NoVel-{version}", package="rl_zoo3.import_envs", settings_of=tuned)


PROBLEMS = {
    "cartpole": _no_velocities("CartPole", "v1"),
    "pendulum": _no_velocities("Pendulum", "v1"),
    "bandit-medium": Problem(id="popgym-MultiarmedBanditMedium-v0", package="popgym", settings_of={}),
    "bandit-hard": Problem(id="popgym-MultiarmedBanditHard-v0", package="popgym", settings_of={}),
}
SHORT: dict[str, Any] = {
    "train.batch_size": 8,
    "train.lr": 5e-4,
    "train.utility_lr": 5e-4,
    "objective.passes": 10,
    "objective.minibatches": 8,
    "objective.target_kl": None,
    "method.positions": "rotary",
    "method.context": 16,
}
"""Settings of our methods for 100,000 steps: small rollouts, many updates, and distances instead of positions."""
SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": SHORT,
    "pendulum": {**SHORT, "objective.discount": 0.9, "domain.reward_scale": 0.1},
}
"""Environment -> settings of our methods that differ from the defaults of `--objective ppo`."""
SMOKE: dict[str, Any] = {
    "train.batch_size": 4,
    "method.d_model": 16,
    "method.num_heads": 2,
    "method.num_layers": 1,
    "method.d_ff": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training and its scores."""

    env: str
    player: str
    seed: int
    steps: int
    """Environment steps asked for; all players stop after the first rollout that reaches them."""
    env_steps: int
    seconds: float
    cpu_seconds: float
    parameters: int
    """Number of weights of the policy and the critic."""
    settings: dict[str, Any]
    """All settings of a peer, as its library takes them; of our methods those that differ from the defaults."""
    returns: list[float]
    """Return of each episode of the evaluation."""
    curve: list[tuple[int, float]]
    """Steps so far, and the mean return of the training episodes that ended since the point before."""
    versions: dict[str, str]
    device: str
    load: float
    """Processes that wanted a core in the last minute of the training."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.env, self.player, self.seed, self.steps


# ---------------------------------------------------------------- playing


class Player(ABC):
    """A trained policy that plays several episodes at a time."""

    @abstractmethod
    def act(self, observations: Sequence[Any], reward_B: Any, *, first: bool) -> Sequence[Any]:
        """Return the action of each episode, given its observation and the reward of its previous action."""


@dataclass(frozen=True, slots=True)
class Trained:
    player: Player
    parameters: int
    env_steps: int
    ended: list[tuple[int, float, int]]
    """Steps so far, mean return, and number of training episodes that ended there."""
    settings: dict[str, Any]


def play(problem: Problem, player: Player, episodes: int) -> list[float]:
    """Return the return of each of so many episodes. An ended episode repeats its last observation."""
    envs = [problem.make() for _ in range(episodes)]
    observations = [env.reset(seed=FIRST_SEED + i)[0] for i, env in enumerate(envs)]
    total_B, reward_B, live_B = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, dtype=bool)
    first = True
    while live_B.any():
        actions, first = player.act(observations, reward_B.astype(np.float32), first=first), False
        reward_B = np.zeros(episodes)
        for i in np.flatnonzero(live_B):
            observations[i], reward_B[i], terminated, truncated, _ = envs[i].step(actions[i])
            live_B[i] = not (terminated or truncated)
        total_B += reward_B
    for env in envs:
        env.close()
    return total_B.tolist()


# ---------------------------------------------------------------- this library


class Ours(Player):
    """A session of a trained run."""

    def __init__(self, run: uat.Run, streams: int) -> None:
        self.domain = run.config.build_domain()
        self.session = uat.Session(uat.load(run.path), streams=streams)

    def act(self, observations: Sequence[Any], reward_B: Any, *, first: bool) -> Sequence[Any]:
        actions = self.session.act(self.domain.observation(*observations), reward=None if first else reward_B)
        return [self.domain.action(actions, i) for i in range(len(observations))]


def train_ours(
    method: str, problem: Problem, folder: Path, *, seed: int, steps: int, episodes: int, settings: dict[str, Any]
) -> Trained:
    last = {"train.steps": steps, "train.validate_every": NEVER, "train.validation_episodes": 1}
    changes = {**last, **settings}
    run = uat.train(problem.name, folder, method=method, seed=seed, settings=changes, objective="ppo", threads=1)
    rows, so_far, ended = run.rows("metrics.jsonl"), 0, []
    for row in rows:
        so_far += int(row["steps"])
        ended.append((so_far, float(row["return"]), run.config.train.batch_size))
    policy = uat.load(run.path)
    modules = OBJECTIVES["ppo"].build(policy, run.config.objective).modules
    assert modules is not None
    count = sum(p.numel() for module in (policy, modules) for p in module.parameters())
    return Trained(Ours(run, episodes), count, so_far, ended, settings)


# ---------------------------------------------------------------- peers


def need_peers() -> None:
    """Raise a ValueError if a library of the peers is missing."""
    for module in ("sb3_contrib", "rl_zoo3"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the peers need {module}: pip install 'uat-transformer[peers]'")


def peer_settings(player: str, problem: Problem) -> dict[str, Any]:
    """Return the settings of a peer as its library takes them, with n_envs and normalize beside them."""
    tuned = problem.settings_of.get(player)
    if tuned is None:
        policy = "MlpLstmPolicy" if player == "recurrent-ppo" else "MlpPolicy"
        return {"n_envs": 8, "normalize": False, "policy": policy}
    import rl_zoo3
    import yaml

    folder = Path(rl_zoo3.__file__).parent / "hyperparams"
    settings = yaml.safe_load((folder / PEERS[player]).read_text(encoding="utf-8"))[tuned]
    del settings["n_timesteps"]
    return {**settings, "normalize": True}


def _converted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of rl_zoo3's files as stable-baselines3 takes them."""
    import rl_zoo3

    found = dict(settings)
    for name in ("learning_rate", "clip_range"):
        if str(found.get(name, "")).startswith("lin_"):
            found[name] = rl_zoo3.linear_schedule(found[name].removeprefix("lin_"))
    if "policy_kwargs" in found:
        found["policy_kwargs"] = eval(found["policy_kwargs"], {"nn": torch.nn, "dict": dict})  # as rl_zoo3 reads it
    return found


class Peer(Player):
    """A policy of stable-baselines3 or sb3-contrib."""

    def __init__(self, model: Any, normalizer: Any, stacked: bool, converter: Any) -> None:
        self.model, self.normalizer, self.stacked, self.converter = model, normalizer, stacked, converter
        self.state: Any = None
        self.stack_BO: Any = None
        self.actions: Any = None

    def act(self, observations: Sequence[Any], reward_B: Any, *, first: bool) -> Sequence[Any]:
        if self.converter is not None:
            actions = [None] * len(observations) if first else self.actions
            observations = [self.converter.rows(o, a) for o, a in zip(observations, actions, strict=True)]
        obs_BO = np.stack(observations)
        if self.normalizer is not None:
            obs_BO = self.normalizer.normalize_obs(obs_BO)
        if self.stacked:
            width = obs_BO.shape[1]
            before_BO = np.zeros((len(obs_BO), STACKED * width), obs_BO.dtype) if first else self.stack_BO
            obs_BO = self.stack_BO = np.concatenate([before_BO[:, width:], obs_BO], axis=1)
        first_B = np.full(len(obs_BO), first)
        self.actions, self.state = self.model.predict(obs_BO, self.state, first_B, deterministic=True)
        return self.actions


def with_previous_action(env: Any) -> Any:
    """Return an environment whose observations are an id and the previous action's id, as one vector."""
    import gymnasium

    class PreviousAction(gymnasium.Wrapper):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.counts = int(inner.observation_space.n), int(inner.action_space.n)
            self.observation_space = gymnasium.spaces.Box(0, 1, (sum(self.counts),), np.float32)

        def rows(self, observation: Any, action: Any) -> Any:
            row, (ids, _) = np.zeros(sum(self.counts), np.float32), self.counts
            row[int(observation)] = 1
            if action is not None:
                row[ids + int(action)] = 1
            return row

        def reset(self, **options: Any) -> Any:
            observation, info = self.env.reset(**options)
            return self.rows(observation, None), info

        def step(self, action: Any) -> Any:
            observation, *others = self.env.step(action)
            return self.rows(observation, action), *others

    return PreviousAction(env)


def train_peer(player: str, problem: Problem, *, seed: int, steps: int, smoke: bool) -> Trained:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    class Ended(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.episodes: list[tuple[int, float, int]] = []

        def _on_step(self) -> bool:
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            self.episodes += [(self.num_timesteps, float(earned), 1) for earned in ended]
            return True

    stated = peer_settings(player, problem) | ({"n_steps": 32} if smoke else {})
    settings, alone = _converted(stated), not problem.settings_of
    envs = make_vec_env(
        lambda: with_previous_action(problem.make()) if alone else problem.make(), settings.pop("n_envs"), seed
    )
    normalizer = None
    if settings.pop("normalize"):
        envs = normalizer = VecNormalize(envs, gamma=settings["gamma"])
    if stacked := player == "ppo-stack":
        envs = VecFrameStack(envs, STACKED)
    ended = Ended()
    algorithm = RecurrentPPO if player == "recurrent-ppo" else PPO
    model = algorithm(env=envs, seed=seed, device="cpu", **settings)
    model.learn(steps, callback=ended)
    envs.close()
    count = sum(p.numel() for p in model.policy.parameters())
    converter = with_previous_action(problem.make()) if alone else None
    return Trained(Peer(model, normalizer, stacked, converter), count, model.num_timesteps, ended.episodes, stated)


# ---------------------------------------------------------------- rows


def curve(ended: Sequence[tuple[int, float, int]], steps: int) -> list[tuple[int, float]]:
    """Return the mean return of the training episodes that ended in each of several equal parts of the steps."""
    points, width = [], max(1, steps // POINTS)
    for part in range(-(-max((at for at, *_ in ended), default=0) // width)):
        own = [(r, n) for at, r, n in ended if part * width < at <= (part + 1) * width]
        if own:
            mean = sum(r * n for r, n in own) / sum(n for _, n in own)
            points.append(((part + 1) * width, round(mean, 4)))
    return points


@cpu_threads(1)
def measure(env: str, player: str, seed: int, steps: int, episodes: int, *, smoke: bool = False) -> Row:
    """Train a player and score it. Importing libraries takes no time of the training."""
    problem = PROBLEMS[env]
    problem.make().close()
    importlib.import_module("uat.training.start")
    if player in PEERS:
        need_peers()
        importlib.import_module("sb3_contrib")
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if player in PEERS:
            trained = train_peer(player, problem, seed=seed, steps=steps, smoke=smoke)
        else:
            settings = SETTINGS.get(env, {}) | (SMOKE if smoke else {})
            run = Path(folder) / "run"
            trained = train_ours(player, problem, run, seed=seed, steps=steps, episodes=episodes, settings=settings)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        load = os.getloadavg()[0]
        returns = play(problem, trained.player, episodes)
    libraries = ("torch", "gymnasium", "stable-baselines3", "sb3-contrib", "rl_zoo3", "popgym")
    found = {name: importlib.metadata.version(name) for name in libraries if _installed(name)}
    return Row(
        env=env,
        player=player,
        seed=seed,
        steps=steps,
        env_steps=trained.env_steps,
        seconds=round(wall, 2),
        cpu_seconds=round(cpu, 2),
        parameters=trained.parameters,
        settings=trained.settings,
        returns=[round(x, 4) for x in returns],
        curve=curve(trained.ended, steps),
        versions={"uat": uat.__version__, **found},
        device=f"CPU, {os.cpu_count()} cores, 1 thread",
        load=round(load, 1),
    )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def read(file: Path) -> list[Row]:
    return [Row(**row) for row in read_rows(file)]


def missing(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield environment, player and seed of the rows that do not exist, with the players in turns."""
    done = {row.key for row in rows}
    for seed in options.seeds:
        for env in options.envs:
            for player in options.players:
                if (env, player, seed, options.steps) not in done:
                    yield env, player, seed


def run(options: argparse.Namespace) -> list[Row]:
    """Train what is missing, and write all rows after each training."""
    rows = read(options.out)
    for env, player, seed in missing(rows, options):
        row = measure(env, player, seed, options.steps, options.episodes, smoke=options.smoke)
        rows = [*read(options.out), row]
        write_atomically(options.out, row_lines(asdict(row) for row in rows).encode())
        mean, pace = np.mean(row.returns), row.env_steps / row.cpu_seconds
        say(f"{env}, {player}, seed {seed}: return {mean:.1f}, {row.seconds:.0f} s, {pace:,.0f} steps per CPU second")
    return rows


# ---------------------------------------------------------------- table


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table: means over seeds, with 95 % intervals over seeds and episodes."""
    lines = [
        "| environment | player | seeds | return | difference from recurrent-ppo | steps/s | steps per CPU second | "
        "parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        groups.setdefault((row.env, row.player, row.steps), []).append(row)
    for (env, player, steps), own in groups.items():
        other = groups.get((env, "recurrent-ppo", steps), [])
        shared = sorted({row.seed for row in own} & {row.seed for row in other})
        apart = "" if player == "recurrent-ppo" or not shared else _words(_of(own, shared) - _of(other, shared))
        seeds = [row.seed for row in own]
        taken = sum(row.env_steps for row in own)
        paces = [f"{taken / sum(getattr(row, name) for row in own):,.0f}" for name in ("seconds", "cpu_seconds")]
        cells = [env, player, str(len(seeds)), _words(_of(own, seeds)), apart, *paces, f"{own[0].parameters:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(rows: Sequence[Row], seeds: Sequence[int]) -> torch.Tensor:
    """(S, E) returns of some seeds."""
    by_seed = {row.seed: row.returns for row in rows}
    return torch.tensor([by_seed[seed] for seed in seeds], dtype=torch.float64)


def _words(y_SE: torch.Tensor) -> str:
    spread = Spread.of(y_SE)
    return f"{spread.mean:.1f} ± {spread.half():.1f}"


# ---------------------------------------------------------------- command line


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["cartpole", "pendulum"], help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--players", nargs="+", default=list(PLAYERS), help="peers and methods of this library")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of each training")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of each evaluation")
    parser.add_argument("--out", type=Path, default=ROWS, help="file of rows")
    parser.add_argument("--smoke", action="store_true", help="tiny trainings on cartpole; rows go to a temporary file")
    parser.add_argument("--table", action="store_true", help="print the table of existing rows and train nothing")
    options = parser.parse_args(arguments)
    for env in options.envs:
        lookup("environment", env, PROBLEMS)
    for player in options.players:
        lookup("player", player, [*PEERS, *METHODS])
    for name, least in (("steps", 1), ("episodes", 2)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least {least}")
    if options.smoke:
        options.envs, options.seeds, options.steps, options.episodes = ["cartpole"], [0], 300, 4
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = options_of(arguments)
        with tempfile.TemporaryDirectory() as folder:
            if options.smoke and options.out == ROWS:
                options.out = Path(folder) / "rows.jsonl"
            print(table(read(options.out) if options.table else run(options)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
