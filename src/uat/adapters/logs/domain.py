"""A log as a domain: its windows are recordings, and a policy is scored by the logged actions.

The target of a step is the logged action, so that imitation is behaviour cloning, or that of a column. Every window
starts without memory.
Agents answer at every step (`Recording.every_step`), since a log has a decision at each of them; metrics are means over
all real steps of all windows of a split.

Axes: B windows, T time, N rows, A actions, R a part of the steps of all windows.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uat.adapters.logs.config import MINARI, PREFIX, LogsConfig, is_minari, settings_beside
from uat.adapters.logs.files import Fingerprint, fingerprint
from uat.adapters.logs.references import habits
from uat.adapters.logs.table import Steps, Table, Windows, read
from uat.contracts import Agent, Answers, Reader, Recording
from uat.data import need
from uat.distributions import distribution
from uat.domains.domain import Domain, Split
from uat.episode import Noise, Trajectory
from uat.files import safe_name
from uat.metrics import Metric
from uat.noise import integers, uniform
from uat.settings import checked, field_types, with_current_names
from uat.spec import Discrete

AT_ONCE = 1 << 22
"""Maximum number of scores in memory while the logged actions are scored."""


class LoggedEpisodes(Recording):
    """Windows of one split. Training draws windows at random; validation and test go through theirs in order."""

    every_step = True

    def __init__(self, table: Table, steps: Steps, windows: Windows, split: Split) -> None:
        self.spec, self.steps, self.windows, self.split = table.spec, steps, windows, split
        self.discrete = isinstance(table.spec.action, Discrete)

    def __len__(self) -> int:
        return len(self.windows)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """Draw a window for each training episode; in validation and test, take the window of this number."""
        ids_B = episode_ids.to(self.windows.begin_W.device, non_blocking=True)
        if self.split == "train":
            return {"window": integers(seed, "logs.window", ids_B, 1, below=len(self))[:, 0]}
        return {"window": ids_B % len(self)}

    def trajectory(self, noise: Noise) -> Trajectory:
        own, steps = self.windows, self.steps
        begin_B, length_B = own.begin_W[noise["window"]], own.length_W[noise["window"]]
        t = torch.arange(self.spec.steps, device=begin_B.device)
        valid_BT = t < length_B[:, None]
        row_BT = torch.where(valid_BT, begin_B[:, None] + t, begin_B[:, None])
        last_BT = t == length_B[:, None] - 1
        terminated_BT = last_BT & steps.terminated_N[row_BT]
        ids = steps.obs.dim() == 1
        action = steps.action[row_BT].long() if self.discrete else steps.action[row_BT]
        padding = ~valid_BT if self.discrete else ~valid_BT[..., None]
        action = action.masked_fill(padding, -1 if self.discrete else 0)
        target = steps.target_N
        target = None if target is None else target[row_BT].long().masked_fill(padding, -1)
        obs, final = steps.obs[row_BT], steps.obs[own.next_W[noise["window"]]]
        obs = obs.long().masked_fill(~valid_BT, -1) if ids else obs.masked_fill(~valid_BT[..., None], 0.0)
        allowed = None
        if steps.allowed_N is not None and steps.allowed_SA is not None:
            allowed = steps.allowed_SA[steps.allowed_N[row_BT].long()] | ~valid_BT[..., None]
        propensity = steps.propensity_N
        return Trajectory(
            obs=obs,
            action=action,
            reward=steps.reward_N[row_BT].masked_fill(~valid_BT, 0.0),
            reward_known=None if steps.known_N is None else steps.known_N[row_BT] & valid_BT,
            terminated=terminated_BT,
            truncated=last_BT & ~terminated_BT,
            final_obs=final.long() if ids else final,
            target=action if target is None else target,
            valid=valid_BT,
            allowed=allowed,
            propensity=None if propensity is None else propensity[row_BT].masked_fill(~valid_BT, 1.0),
        )

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        """Add the sums over each window's real steps of the log-probability of the target, which is the logged action
        unless a column holds another, and of how well the most likely action agrees with it."""
        valid_BT, action = trajectory.valid, trajectory.required_target.flatten(0, 1)
        parts, size = [], max(1, AT_ONCE // self.spec.action.numbers)
        for begin in range(0, valid_BT.numel(), size):
            rows = slice(begin, begin + size)
            numbers = answers.every(rows)
            law = distribution(self.spec, numbers)
            agreement_R = _met(numbers, action[rows]) if self.discrete else (law.mode - action[rows]).abs().mean(-1)
            parts.append(torch.stack([law.log_prob(action[rows]).double(), agreement_R.double()], dim=1))
        score_BTM = torch.cat(parts).view(*valid_BT.shape, 2).masked_fill(~valid_BT[..., None], 0.0)
        sums = {name: score_BTM[..., i].sum(1) for i, name in enumerate(("log_likelihood", "agreement"))}
        return replace(trajectory, facts={**trajectory.facts, **sums})


def _met(score_RA: Tensor, action_R: Tensor) -> Tensor:
    """Return 1 where the logged action has the highest score, or its share of the actions that share that score."""
    most_R1 = score_RA.amax(-1, keepdim=True)
    hit_R = score_RA.gather(-1, action_R.clamp_min(0)[:, None]) == most_R1
    return hit_R[:, 0] / (score_RA == most_R1).sum(-1)


class LogsDomain(Domain):
    """Your log: who, when, what was seen, what was done, and what was earned."""

    def __init__(self, config: LogsConfig) -> None:
        self.config = config
        self.table = _table(config, fingerprint(config.path))
        self.spec, self.name, self.setting = self.table.spec, name_of(config.path), config.setting
        self.discrete = isinstance(self.spec.action, Discrete)
        agreement = Metric(name="accuracy", label="Accuracy")
        if not self.discrete:
            agreement = Metric(name="error", label="Mean absolute error", higher_is_better=False)
        logged = (Metric(name="logged_reward", label="Logged reward"),) if config.reward else ()
        self.metrics = (Metric(name="log_likelihood", label="Log-likelihood"), agreement, *logged)
        windows, episodes = len(self.table.windows["test"]), self.table.facts["episodes"] * config.test_share
        self.block = max(1.0, windows / max(1.0, episodes))
        """Windows of one episode follow each other and are resampled together."""

    @property
    def registered(self) -> tuple[str, LogsConfig]:
        return self.name, self.config

    @property
    def episodes(self) -> dict[str, int]:
        return {split: len(self.windows(split)) for split in ("validation", "test")}

    def windows(self, split: str) -> Windows:
        """Return the windows of a split; of validation and test, at most as many as the settings allow."""
        own = self.table.windows[split]
        most = {"validation": self.config.validation_windows, "test": self.config.test_windows}.get(split, len(own))
        if len(own) <= most:
            return own
        drawn = uniform(0, f"logs.{split}", torch.arange(len(own)), 1)[:, 0].argsort()[:most].sort().values
        return own.map(lambda x: x[drawn])

    def simulator(self, split: Split, device: torch.device | str) -> LoggedEpisodes:
        return LoggedEpisodes(self.table, self.table.steps.to(device), self.windows(split).to(device), split)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return sums over each window, and its numbers of steps and of known rewards."""
        known_BT = trajectory.valid if trajectory.reward_known is None else trajectory.reward_known & trajectory.valid
        values = {self.metrics[0].name: trajectory.facts["log_likelihood"], "steps": trajectory.valid.sum(1)}
        values[self.metrics[1].name] = trajectory.facts["agreement"]
        if self.config.reward:
            values |= {"logged_reward": torch.where(known_BT, trajectory.reward, 0.0).sum(1), "known": known_BT.sum(1)}
        return values

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return values whose mean is a mean over all real steps: sums divided by the mean number of steps."""
        per_window = {m.name: "known" if m.name == "logged_reward" else "steps" for m in self.metrics}
        return {name: values[name].double() / values[n].double().mean() for name, n in per_window.items()}

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        """Return "random" among the allowed actions, "frequent" by the training part's shares of actions, and "repeat"
        by its shares given the previous action."""
        return habits(self.spec, self.table.action_counts)

    # ------------------------------------------------------------ raw rows

    def preparation(self) -> dict[str, Any]:
        return self.table.preparation.to_json()

    def observation(self, rows: Any) -> Any:
        """Return the observation of a raw row, or of one row for each stream; see `Preparation.observation`."""
        return self.table.preparation.observation(rows)

    def action_name(self, action: Any) -> Any:
        """Return the action as the log writes it."""
        return self.table.preparation.action_name(action)

    def action_id(self, name: Any) -> int:
        """Return the id of an action as the log writes it."""
        return self.table.preparation.action_id(name)


@lru_cache(maxsize=2)
def _table(config: LogsConfig, files: Fingerprint) -> Table:
    """Read a log once for all of its runs; a file that has changed is read again."""
    return read(config)


# ---------------------------------------------------------------- names


def name_of(path: str) -> str:
    """Return the name of a log in configs: logs:events for any path to events.parquet."""
    stem = path.removeprefix(MINARI) if is_minari(path) else Path(path).stem
    return PREFIX + (safe_name(stem) or "log")


def known_as(name: str) -> tuple[str, LogsConfig]:
    """Return the name of a log in configs, and its settings: the path, and those of the TOML file beside it."""
    path = name.removeprefix(PREFIX)
    need("polars", "data", f"reading {name}")
    fingerprint(path)  # raises an error if there is no such log
    beside = settings_beside(path)
    roles = {}
    if is_minari(path):
        from uat.adapters.logs.minari import ROLES

        roles = dict(ROLES)
    return name_of(path), settings({**roles, **beside, "path": path}, f"the settings beside {path}")


def settings(values: Mapping[str, Any], where: str) -> LogsConfig:
    """Return settings from a table of values; a name alone may stand for a list of one."""
    known = field_types(LogsConfig)
    values = with_current_names(LogsConfig, values)
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"{where} set {name!r}, which is not a setting of a log; {advice}")
    listed = {
        name: (value,) if isinstance(value, str) and "tuple" in str(known[name]) else value
        for name, value in values.items()
    }
    return LogsConfig(**{name: checked(value, known[name], f"domain.{name}") for name, value in listed.items()})
