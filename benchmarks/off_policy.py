"""Measure how often 95 % intervals of off-policy estimates cover the true value, and when numbers are refused.

    python benchmarks/off_policy.py --repetitions 300 --out benchmarks/results/off-policy.json

Each repetition draws a log from a bandit with three arms and a hidden regime, and estimates the worth of a policy that
looks back one step: it repeats an arm that paid and leaves one that did not. Its true worth is computed exactly. Rows
count refusals, and coverage both with refusals and as if there were none.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uat.evaluation.off_policy import (
    Estimate,
    LoggedSteps,
    OffPolicyConfig,
    deployment,
    fit_behaviour,
    fit_rewards,
    fit_values,
    one_step,
)

ARMS = 3
FLIP = 0.1
"""Probability that the good arm moves, after each step."""
PAYS = (0.25, 0.8)
"""Probability of a reward from the other arms, and from the good one."""

Rule = Callable[[Tensor, Tensor], Tensor]
"""Maps the previous arm (-1: none) and reward of N streams to probabilities (N, A)."""


def stay_or_shift(stay: float) -> Rule:
    """Repeat an arm that paid with this probability, and leave one that did not pay with the same one."""

    def rule(arm_N: Tensor, reward_N: Tensor) -> Tensor:
        same_NA = (arm_N[:, None] == torch.arange(ARMS)).double()
        keep_N1 = torch.where(reward_N > 0, stay, 1 - stay)[:, None].double()
        chosen_NA = same_NA * keep_N1 + (1 - same_NA) * (1 - keep_N1) / (ARMS - 1)
        return torch.where((arm_N < 0)[:, None], 1 / ARMS, chosen_NA)

    return rule


def uniform(arm_N: Tensor, reward_N: Tensor) -> Tensor:
    return torch.full((len(arm_N), ARMS), 1 / ARMS, dtype=torch.float64)


def mixed(one: Rule, other: Rule) -> Rule:
    """Act by either rule with probability one half."""
    return lambda arm_N, reward_N: (one(arm_N, reward_N) + other(arm_N, reward_N)) / 2


TARGET = stay_or_shift(0.8)
LOGGING: dict[str, Rule] = {
    "near": stay_or_shift(0.7),
    "moderate": mixed(TARGET, uniform),
    "uniform": uniform,
    "far": stay_or_shift(0.2),
}


@dataclass(frozen=True, slots=True)
class Log:
    """Episodes of the bandit under one rule."""

    arm_BT: Tensor
    reward_BT: Tensor
    before: list[tuple[Tensor, Tensor]]
    """Previous arm and reward of each step."""

    def probabilities(self, rule: Rule) -> Tensor:
        """(B, T, A) probabilities of a rule, given the logged histories."""
        return torch.stack([rule(*history) for history in self.before], dim=1)

    def features(self) -> Tensor:
        """(B, T, 6) the previous arm, separately if it paid and if it did not."""
        columns = []
        for arm_B, reward_B in self.before:
            one_BA = (arm_B[:, None] == torch.arange(ARMS)).double()
            columns.append(torch.cat([one_BA * reward_B[:, None], one_BA * (1 - reward_B)[:, None]], dim=1))
        return torch.stack(columns, dim=1)

    def steps(self, target: Rule, logging: Rule | Tensor) -> LoggedSteps:
        """Return the log with probabilities; those of the logging policy may be estimated ones (B, T, A)."""
        target_BTA = self.probabilities(target)
        behaviour_BTA = logging if isinstance(logging, Tensor) else self.probabilities(logging)
        index_BT1 = self.arm_BT[..., None]
        return LoggedSteps(
            reward_BT=self.reward_BT,
            target_BT=target_BTA.gather(-1, index_BT1)[..., 0],
            propensity_BT=behaviour_BTA.gather(-1, index_BT1)[..., 0],
            target_BTA=target_BTA,
            behaviour_BTA=behaviour_BTA,
            action_BT=self.arm_BT,
            features_BTF=self.features(),
        )


def play(rule: Rule, episodes: int, horizon: int, generator: torch.Generator) -> Log:
    """Return episodes in which the hidden good arm starts anywhere and sometimes moves."""
    good_B = torch.randint(ARMS, (episodes,), generator=generator)
    arm_B, reward_B = torch.full((episodes,), -1), torch.zeros(episodes, dtype=torch.float64)
    arms, rewards, before = [], [], []
    for _ in range(horizon):
        before.append((arm_B, reward_B))
        arm_B = torch.multinomial(rule(arm_B, reward_B), 1, generator=generator)[:, 0]
        paid_B = torch.where(arm_B == good_B, PAYS[1], PAYS[0])
        reward_B = (torch.rand(episodes, generator=generator) < paid_B).double()
        moves_B = torch.rand(episodes, generator=generator) < FLIP
        step_B = 1 + torch.randint(ARMS - 1, (episodes,), generator=generator)
        good_B = torch.where(moves_B, (good_B + step_B) % ARMS, good_B)
        arms.append(arm_B)
        rewards.append(reward_B)
    return Log(torch.stack(arms, 1), torch.stack(rewards, 1), before)


def true_values(target: Rule, logging: Rule, horizon: int) -> tuple[float, float]:
    """Return the mean return of the target's episodes, and its mean reward of one step after the logging policy's
    history, by the exact distribution of (good arm, previous arm, previous reward)."""
    pays_GA = torch.full((ARMS, ARMS), PAYS[0]).double() + (PAYS[1] - PAYS[0]) * torch.eye(ARMS)
    moves_GG = torch.full((ARMS, ARMS), FLIP / (ARMS - 1)).double()
    moves_GG.fill_diagonal_(1 - FLIP)
    arm_N = torch.arange(-1, ARMS).repeat_interleave(2)
    reward_N = torch.tensor([0.0, 1.0]).repeat(ARMS + 1)

    def walk(history: Rule, last: Rule) -> float:
        """Sum over steps of the mean reward of `last` after a history of the other rule."""
        state_GN, total = torch.zeros(ARMS, len(arm_N), dtype=torch.float64), 0.0
        state_GN[:, 0] = 1 / ARMS
        acts_NA, last_NA = history(arm_N, reward_N).double(), last(arm_N, reward_N).double()
        for _ in range(horizon):
            total += (state_GN[:, :, None] * last_NA * pays_GA[:, None]).sum().item()
            chosen_GA = (state_GN[:, :, None] * acts_NA).sum(1)
            after_GA2 = torch.stack([chosen_GA * (1 - pays_GA), chosen_GA * pays_GA], dim=-1)
            state_GN = torch.zeros_like(state_GN)
            state_GN[:, 2:] = moves_GG.T @ after_GA2.flatten(1)
        return total

    return walk(target, target), walk(logging, target) / horizon


@dataclass(slots=True, kw_only=True)
class Row:
    logging: str
    propensities: str
    """Known, or fitted to the log."""
    horizon: int
    episodes: int
    question: str
    estimate: str
    truth: float
    repetitions: int
    refused: int
    """Repetitions without a number."""
    coverage: float | None
    """Share of the printed intervals that cover the truth; None: none was printed."""
    coverage_unrefused: float | None
    """Share of all intervals that cover the truth, with refusals off."""
    bias: float
    """Mean error of all repetitions, with refusals off."""
    width: float | None
    """Median width of the intervals, with refusals off; None: this estimate has no interval."""
    ess: float
    """Median effective sample size."""


def measure(
    name: str,
    horizon: int,
    episodes: int,
    repetitions: int,
    *,
    fitted: bool = False,
    config: OffPolicyConfig = OffPolicyConfig(),  # noqa: B008
) -> list[Row]:
    """Return one row for each estimate."""
    anyway = replace(config, least_ess=1.0, most_weight_errors=1e9)
    quick, pairs = replace(config, resamples=2), {}
    truths = true_values(TARGET, LOGGING[name], horizon)
    for repetition in range(repetitions):
        log = play(LOGGING[name], episodes, horizon, torch.Generator().manual_seed(repetition))
        steps = log.steps(TARGET, estimated(log) if fitted else LOGGING[name])
        for judge, values in ((deployment, fit_values), (one_step, fit_rewards)):
            settings = {"discount": config.discount} if values is fit_values else {}
            fit = values(steps, folds=config.folds, penalty=config.ridge, seed=config.seed, **settings)
            for short, e in zip(judge(steps, quick, values=fit), judge(steps, anyway, values=fit), strict=True):
                pairs.setdefault((e.question, e.name), []).append((short.value is not None, e))
    about = {"logging": name, "propensities": "fitted" if fitted else "known", "horizon": horizon}
    return [
        summary(pair, truths[question.startswith("one-step")], {**about, "episodes": episodes, "question": question})
        for (question, name), pair in pairs.items()
        if name != "log"
    ]


def estimated(log: Log) -> Tensor:
    """Return the probabilities (B, T, A) of a behaviour model that is fitted to the log."""
    model = fit_behaviour(log.features(), log.arm_BT, actions=ARMS)
    return model.probabilities(log.features())


def summary(pairs: list[tuple[bool, Estimate]], truth: float, about: dict[str, Any]) -> Row:
    """Return the row of one estimate over all repetitions."""
    values, found = [e.value for _, e in pairs if e.value is not None], [e for _, e in pairs]
    covers = [e.low <= truth <= e.high for e in found if e.low is not None and e.high is not None]
    printed = [hit for (shown, _), hit in zip(pairs, covers, strict=False) if shown]
    widths = [e.high - e.low for e in found if e.low is not None and e.high is not None]
    return Row(
        **about,
        estimate=found[0].name,
        truth=round(truth, 6),
        repetitions=len(pairs),
        refused=sum(not shown for shown, _ in pairs),
        coverage=round(sum(printed) / len(printed), 4) if printed else None,
        coverage_unrefused=round(sum(covers) / len(covers), 4) if covers else None,
        bias=round(sum(values) / len(values) - truth, 5),
        width=round(statistics.median(widths), 5) if widths else None,
        ess=round(statistics.median(e.ess for e in found), 1),
    )


CASES: list[tuple[str, int, int, bool]] = [
    ("near", 4, 1000, False),
    ("moderate", 4, 1000, False),
    ("uniform", 4, 1000, False),
    ("near", 8, 1000, False),
    ("moderate", 8, 1000, False),
    ("uniform", 6, 2000, False),
    ("uniform", 8, 1000, False),
    ("far", 4, 1000, False),
    ("far", 10, 1000, False),
    ("moderate", 4, 1000, True),
]
"""Logging policy, horizon, number of episodes, and whether propensities are fitted to the log."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=300, help="logs of each case")
    parser.add_argument("--out", type=Path, help="file for the rows; the table is printed in any case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, horizon, episodes, fitted in CASES:
        made = measure(name, horizon, episodes, options.repetitions, fitted=fitted)
        print(*map(line, made), sep="\n", flush=True)
        rows += made
    if options.out is not None:
        command = f"python benchmarks/off_policy.py --repetitions {options.repetitions}"
        content = {"command": command, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    coverage, everywhere = ("-".center(5) if x is None else f"{x:.3f}" for x in (row.coverage, row.coverage_unrefused))
    return (
        f"{row.logging:8} {row.propensities:6} T={row.horizon:<2} n={row.episodes:<5} {row.question.split()[0]:10} "
        f"{row.estimate:5} ESS {row.ess:7.1f} refused {row.refused / row.repetitions:6.1%} coverage {coverage} "
        f"(without refusals {everywhere}) bias {row.bias:+.4f} width {row.width or 0:.3f} of {row.truth:.3f}"
    )


def markdown(rows: list[Row]) -> str:
    """Return the table of docs/off-policy.md: deployment by `wis` and `dr`, one line for each case."""
    lines = [
        "| logging policy | steps | episodes | effective size | refused "
        "| `wis` | without refusals | `dr` | without refusals |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in rows:
        if row.question.startswith("deployment"):
            cases.setdefault((row.logging, row.propensities, row.horizon, row.episodes), {})[row.estimate] = row
    for (logging, propensities, horizon, episodes), by_name in cases.items():
        wis, dr = by_name["wis"], by_name["dr"]
        name = logging if propensities == "known" else f"{logging}, fitted propensities"
        shares = (share(x) for x in (wis.coverage, wis.coverage_unrefused, dr.coverage, dr.coverage_unrefused))
        refused = f"{100 * wis.refused / wis.repetitions:.1f} %"
        lines.append(f"| {name} | {horizon} | {episodes:,} | {wis.ess:.0f} | {refused} | {' | '.join(shares)} |")
    return "\n".join(lines)


def share(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f} %"


if __name__ == "__main__":
    main()
