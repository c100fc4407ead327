"""Measure what objectives learn from a log: agreement with the best action in held-out episodes.

    python benchmarks/logged_objectives.py --out benchmarks/results/logged-objectives.json

docs/objectives.md names the commands of the committed rows, which are a part of these.
Each log holds 1,250 episodes of 20 to 60 steps (50,000 rows). A context is observed; one action pays more often than
the others, and which one depends on the context and on a hidden regime that sometimes changes. The logging policy knows
no regime: half of its actions are uniform, the others its favourite in the context. Training on the true best action,
which no log holds, is the upper bound; the filter that knows the law is beyond it.

The settings of `advantage` were chosen on the test episodes of the log "tuned". The log "fresh" has the same law, other
episodes, and was measured once. The log "hard" has more contexts and actions and less certain rewards; early variants
failed on it, and the settings were not chosen on it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import uat
from uat.noise import integers, uniform

STEPS = 60
FLIP = 0.05
"""Probability that another regime begins, at each step."""
SIZES = {"train": 1250, "validation": 200, "test": 400}
FIRST = {"train": 0, "validation": 1250, "test": 1450}
"""Number of each split's first episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    contexts: int = 2
    actions: int = 3
    pays: tuple[float, float] = (0.1, 0.9)
    """Probability of a reward from the other actions, and from the best one."""
    seed: int = 7
    """Seed of all draws of the log."""

    @property
    def spec(self) -> uat.Spec:
        return uat.Spec(obs=uat.Vector(self.contexts), action=uat.Discrete(self.actions), horizon=STEPS)


PROBLEMS = {
    "tuned": Problem(),
    "fresh": Problem(seed=8),
    "hard": Problem(contexts=3, actions=4, pays=(0.2, 0.8)),
}


class Log(uat.Recording):
    """The episodes of one split; all draws depend on the episode's number alone."""

    def __init__(self, problem: Problem, split: str) -> None:
        self.problem, self.split, self.spec = problem, split, problem.spec

    def noise(self, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the draws of these episodes; a training takes the log's episodes again and again."""
        p, ids = self.problem, FIRST[self.split] + episode_ids % SIZES[self.split]
        draws = {name: uniform(p.seed, name, ids, STEPS) for name in ("explore", "flip", "pay")}
        below = {"context": p.contexts, "action": p.actions, "regime": p.actions}
        draws |= {name: integers(p.seed, name, ids, STEPS, below=n) for name, n in below.items()}
        return {**draws, "length": 20 + integers(p.seed, "length", ids, 1, below=41)[:, 0]}

    def trajectory(self, noise: dict[str, Tensor]) -> uat.Trajectory:
        actions, (other, best) = self.problem.actions, self.problem.pays
        flip_BT, regimes, regime_B = noise["flip"] < FLIP, [], noise["regime"][:, 0]
        for t in range(STEPS):
            regime_B = torch.where(flip_BT[:, t], noise["regime"][:, t], regime_B)
            regimes.append(regime_B)
        best_BT = (noise["context"] + torch.stack(regimes, dim=1)) % actions
        action_BT = torch.where(noise["explore"] < 0.5, noise["action"], noise["context"])
        valid_BT = torch.arange(STEPS) < noise["length"][:, None]
        pays_BT = torch.where(action_BT == best_BT, best, other)
        return uat.Trajectory(
            obs=torch.nn.functional.one_hot(noise["context"], self.problem.contexts).float(),
            action=action_BT,
            reward=(noise["pay"] < pays_BT).float(),
            terminated=torch.arange(STEPS) == noise["length"][:, None] - 1,
            target=torch.where(valid_BT, best_BT, -1),
            valid=valid_BT,
        )

    def judged(self, trajectory: uat.Trajectory, noise: dict[str, Tensor], answers: Any) -> uat.Trajectory:
        row_B = torch.arange(len(trajectory.valid))
        best_B = trajectory.required_target[row_B, trajectory.valid.sum(1) - 1]
        right_B = answers.every(slice(None)).argmax(-1) == best_B
        return replace(trajectory, facts={"agreement": right_B.float()})


class HiddenRegime(uat.Domain):
    """A log of decisions whose best action depends on a hidden regime."""

    name = "hidden-regime"
    metrics = (uat.Metric(name="agreement", label="Agreement at the last step"),)
    episodes = {name: SIZES[name] for name in ("validation", "test")}  # noqa: RUF012

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spec = problem, problem.spec

    def simulator(self, split: str, device: torch.device | str) -> Log:
        return Log(self.problem, split)

    def measure(self, trajectory: uat.Trajectory) -> dict[str, Tensor]:
        return {"agreement": trajectory.facts["agreement"]}


def held_out(problem: Problem) -> uat.Trajectory:
    recording = Log(problem, "test")
    return recording.trajectory(recording.noise(torch.arange(SIZES["test"]), 0))


def filtered_best(log: uat.Trajectory, problem: Problem) -> Tensor:
    """(B, T) the most probable best action, by the Bayes filter that knows the law."""
    actions, (other, best) = problem.actions, problem.pays
    posterior_BR = torch.full((len(log.valid), actions), 1 / actions, dtype=torch.float64)
    stay_RR = torch.full((actions, actions), FLIP / actions).double() + (1 - FLIP) * torch.eye(actions)
    context_BT, found = log.obs.argmax(-1), []
    for t in range(STEPS):
        posterior_BR = posterior_BR @ stay_RR
        found.append((context_BT[:, t] + posterior_BR.argmax(-1)) % actions)
        hit_BR = (context_BT[:, t, None] + torch.arange(actions)) % actions == log.action[:, t, None]
        pays_BR = torch.where(hit_BR, best, other)
        posterior_BR = posterior_BR * torch.where(log.reward[:, t, None] > 0, pays_BR, 1 - pays_BR)
        posterior_BR = posterior_BR / posterior_BR.sum(-1, keepdim=True)
    return torch.stack(found, dim=1)


def agreement(chosen_BT: Tensor, log: uat.Trajectory) -> tuple[float, float]:
    """Return the share of real steps at which the best action is chosen, and its standard error over episodes."""
    right_BT, count_B = (chosen_BT == log.target) & log.valid, log.valid.sum(1).double()
    share = right_BT.sum() / count_B.sum()
    error_B = right_BT.sum(1) - share * count_B
    return share.item(), (error_B.square().sum().sqrt() / count_B.sum()).item()


TRAINING = {
    "train.epochs": 500,
    "train.batch_size": 64,
    "train.lr": 1e-3,
    "train.utility_lr": 1e-2,
    "train.validate_every": 20,
    "train.patience": 500,
    "method.d_model": 32,
    "method.num_heads": 2,
    "method.num_layers": 2,
    "method.d_ff": 64,
}
OBJECTIVES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "true best action": ("imitation", {}),
    "advantage": ("advantage", {"objective.discount": 0.0}),
    "filtered": ("filtered", {"objective.by": "step", "objective.discount": 0.0}),
    "clone": ("clone", {}),
    "advantage, discount 0.9": ("advantage", {"objective.discount": 0.9}),
    "filtered, episodes": ("filtered", {}),
}
"""Name -> objective and its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    log: str
    method: str
    learnt_by: str
    seed: int
    agreement: float
    """Share of all held-out steps at which the greedy action is the best one, under the logged history."""
    error: float
    """Its standard error over episodes."""
    seconds: float


def measure(log: str, method: str, learnt_by: str, seed: int) -> Row:
    """Train once and return its row."""
    objective, own = OBJECTIVES[learnt_by]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"method": method, "objective": objective, "seed": seed, "device": "cpu", "threads": 1}
        run = uat.train(HiddenRegime(PROBLEMS[log]), Path(folder) / "run", **how, settings={**TRAINING, **own})
        policy = uat.load(run.path).eval()
    seconds, episodes = time.perf_counter() - begin, held_out(PROBLEMS[log])
    with torch.no_grad():
        chosen_BT = policy.logits(policy.spec.clock.batch(episodes)).argmax(-1)
    share, error = agreement(chosen_BT, episodes)
    about = {"agreement": round(share, 4), "error": round(error, 4), "seconds": round(seconds, 1)}
    return Row(log=log, method=method, learnt_by=learnt_by, seed=seed, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", nargs="+", default=["tuned"], choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=["uat-late", "adt", "vanilla"])
    parser.add_argument("--learnt-by", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, help="file for the rows, which replaces rows of the same trainings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[tuple[str, str, str, int], Row] = {}
    if options.out is not None and options.out.exists():
        before = [Row(**row) for row in json.loads(options.out.read_text(encoding="utf-8"))["rows"]]
        rows = {(row.log, row.method, row.learnt_by, row.seed): row for row in before}
    cases = [
        (g, m, o, s) for s in options.seeds for g in options.logs for m in options.methods for o in options.learnt_by
    ]
    for case in cases:
        rows[case] = row = measure(*case)
        print(
            f"{row.log} {row.method:9} {row.learnt_by:24} {row.seed} {row.agreement:.3f} ± {row.error:.3f}", flush=True
        )
        if options.out is not None:
            about = {
                "command": "python benchmarks/logged_objectives.py",
                "torch": torch.__version__,
                "bounds": bounds(),
            }
            content = {**about, "rows": [asdict(rows[key]) for key in sorted(rows)]}
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def bounds() -> dict[str, dict[str, float]]:
    """Return the agreement of the filter that knows the law, and of the log's own actions, for each log."""
    found = {}
    for name, problem in PROBLEMS.items():
        log = held_out(problem)
        chosen = {"filter": filtered_best(log, problem), "log": log.action}
        found[name] = {who: round(agreement(action_BT, log)[0], 4) for who, action_BT in chosen.items()}
    return found


if __name__ == "__main__":
    main()
