"""Traps of learning from logs: leaks, the copycat, confounders, rare actions and rewards, scales.

Associations are measured on at most SAMPLE rows of whole episodes, after numbers are put into BINS groups of equal
size. Each threshold is far above what independent columns of that many rows show.

Axes: N rows of the sample, A actions, K groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from uat.adapters.logs.columns import codes, numbers
from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log
from uat.adapters.logs.findings import Findings
from uat.adapters.logs.table import Table
from uat.archives import Array
from uat.spec import Discrete, Named

SAMPLE = 300_000
"""Most rows of the sample."""
BINS, FEWEST = 50, 200
"""Groups of a column of numbers or of its most frequent categories; fewest rows for a statement."""
GIVEN_AWAY, GAINED = 0.98, 0.05
"""Share of rows in which a column gives an action away, and how much more than the most frequent action that is."""
EXPLAINED = 0.9
"""Share of the variance of rewards that a column explains from which on it is reported as a leak."""
COPIED, COPIED_MORE = 0.85, 0.15
"""Share of actions that the previous action gives away, and how much more than the most frequent action that is."""
RARE_ACTION, FEW_ROWS = 0.001, 20
DOMINANT = 0.9
"""Share of the most frequent action from which on classes are imbalanced."""
RARE_REWARD = 0.99
SCALES = 100.0
"""Ratio of the largest to the smallest deviation, or size of mean or deviation, that counts as raw."""
TIED_TO_ACTION, TIED_TO_REWARD = 0.15, 0.02
"""Cramér's V with the action, and share of explained variance of rewards, from which on a column may confound."""
OFF, SIGMAS = 0.1, 5.0
"""How far the mean of 1 / propensity over an action's rows may be from 1, absolutely and in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Rows of whole episodes, in the order of a table."""

    rows: Array
    log_rows: Array
    follows_N: Array
    """True where the next row of the sample is the next step of the same episode."""
    action_N: Array
    """Ids, or groups of the first number of the action."""
    reward_N: Array
    known_N: Array

    @property
    def actions(self) -> int:
        return int(self.action_N.max()) + 1


def sample_of(table: Table) -> Sample:
    """Return the rows of evenly spaced episodes of a table."""
    keys = table.keys
    step = -(-len(keys.order_N) // SAMPLE)
    rows = (
        np.flatnonzero(keys.episode_N % step == 0)
        if keys.episodes > 10 * step
        else np.arange(len(keys.order_N))[:SAMPLE]
    )
    action = table.steps.action[torch.from_numpy(rows)].numpy()
    known = table.steps.known_N
    follows_N = np.append(np.diff(rows) == 1, False)
    follows_N[:-1] &= ~keys.begins_N[rows[1:]]
    return Sample(
        rows=rows,
        log_rows=keys.order_N[rows],
        follows_N=follows_N,
        action_N=action.astype(np.int64) if action.ndim == 1 else grouped(action[:, 0]),
        reward_N=table.steps.reward_N[torch.from_numpy(rows)].numpy().astype(np.float64),
        known_N=np.ones(len(rows), dtype=bool) if known is None else known[torch.from_numpy(rows)].numpy(),
    )


def find_traps(config: LogsConfig, log: Log, table: Table, findings: Findings) -> None:
    """Add what is odd in the values of a log to the findings."""
    sample = sample_of(table)
    _actions(config, table, sample, findings)
    _rewards(config, table, findings)
    _scales(config, table, findings)
    for name, group_N in _observed(table, sample):
        _constant(name, group_N, findings)
        _leaks(name, group_N, sample, config, findings)
    _confounders(config, log, table, sample, findings)
    if config.propensity and table.action_counts is not None and table.steps.allowed_N is None:
        _mismatch(config, table, findings)


# ---------------------------------------------------------------- groups and associations


def grouped(value_N: Array) -> Array:
    """Return the group of each number: its value if there are few values, otherwise one of BINS of about equal size."""
    values = np.unique(value_N[: 20 * BINS])
    if len(values) <= BINS:
        values = np.unique(value_N)
    if len(values) <= BINS:
        return np.searchsorted(values, value_N)
    edges, repeated = np.unique(np.quantile(value_N, np.arange(1, BINS) / BINS), return_counts=True)
    edges = np.union1d(edges, np.nextafter(edges[repeated > 1], np.inf))  # frequent values get a group of their own
    return np.searchsorted(edges, value_N, side="right")


def frequent(code_N: Array) -> Array:
    """Return the group of each category: the most frequent ones have their own, all others share one."""
    counts = np.bincount(code_N + 1)
    place = np.full(len(counts), BINS)
    place[np.argsort(-counts, kind="stable")[:BINS]] = np.arange(min(BINS, len(counts)))
    return place[code_N + 1]


def counted(group_N: Array, class_N: Array, classes: int) -> Array:
    """Count classes in each group (K, C)."""
    groups = int(group_N.max()) + 1
    return np.bincount(group_N * classes + class_N, minlength=groups * classes).reshape(groups, classes)


def given_away(group_N: Array, class_N: Array) -> tuple[float, float]:
    """Return the share of rows whose class the best guess from the group meets, and from no group at all."""
    count_KC = counted(group_N, class_N, int(class_N.max()) + 1)
    return count_KC.max(1).sum() / len(class_N), count_KC.sum(0).max() / len(class_N)


def explained(group_N: Array, value_N: Array) -> float:
    """Return the share of the variance of values that the means of the groups explain."""
    count_K = np.bincount(group_N)
    mean_K = np.bincount(group_N, value_N) / np.maximum(count_K, 1)
    variance = value_N.var()
    return float((count_K * (mean_K - value_N.mean()) ** 2).sum() / len(value_N) / variance) if variance > 0 else 0.0


def cramer(group_N: Array, class_N: Array) -> float:
    """Return Cramér's V of two columns, corrected for chance."""
    count_KC = counted(group_N, class_N, int(class_N.max()) + 1).astype(np.float64)
    count_KC = count_KC[count_KC.sum(1) > 0][:, count_KC.sum(0) > 0]
    groups, classes = count_KC.shape
    if min(groups, classes) < 2:
        return 0.0
    n = count_KC.sum()
    expected_KC = count_KC.sum(1, keepdims=True) * count_KC.sum(0) / n
    phi = ((count_KC - expected_KC) ** 2 / expected_KC).sum() / n - (groups - 1) * (classes - 1) / (n - 1)
    return float(np.sqrt(max(0.0, phi) / (min(groups, classes) - 1)))


def _observed(table: Table, sample: Sample) -> list[tuple[str, Array]]:
    """Return the groups of each observed column."""
    space, obs = table.spec.obs, table.steps.obs[torch.from_numpy(sample.rows)]
    prepared = table.preparation
    if not isinstance(space, Named):
        if obs.dim() == 1:
            return [(next(iter(prepared.categories)), frequent(obs.numpy().astype(np.int64)))]
        return [(name, grouped(obs[:, i].numpy())) for i, name in enumerate(prepared.numbers)]
    found, at = [], 0
    for name in space.names:
        if name in prepared.categories:
            found.append((name, frequent(obs[:, at].numpy().astype(np.int64) - 1)))
            at += 1
        else:
            found += [(own, grouped(obs[:, at + i].numpy())) for i, own in enumerate(prepared.numbers)]
            at += len(prepared.numbers)
    return found


# ---------------------------------------------------------------- findings


def _actions(config: LogsConfig, table: Table, sample: Sample, findings: Findings) -> None:
    if table.action_counts is None or not isinstance(table.spec.action, Discrete):
        return
    count_A = table.action_counts.sum(0).numpy()
    total, names = int(count_A.sum()), table.preparation.action_names
    rare = [i for i in range(len(names)) if count_A[i] < max(FEW_ROWS, RARE_ACTION * total)]
    if rare:
        i = min(rare, key=lambda a: int(count_A[a]))
        findings.warning(
            "rare-actions",
            len(rare),
            f"{len(rare)} of {len(names)} actions are rare: {names[i]!r} was taken in {count_A[i]:,} of {total:,} "
            "training rows; a policy cannot learn when they pay, so merge them, or leave them out",
        )
    if (most := count_A.max() / total) > DOMINANT:
        findings.warning(
            "class-imbalance",
            1,
            f"the action {names[int(count_A.argmax())]!r} makes {most:.1%} of the training rows: always taking it has "
            "that accuracy, so compare log-likelihoods with the reference `frequent`",
        )
    pair_N = np.flatnonzero(sample.follows_N)
    if len(pair_N) >= FEWEST:
        share, without = given_away(sample.action_N[pair_N], sample.action_N[pair_N + 1])
        if share > COPIED and share > without + COPIED_MORE:
            findings.warning(
                "copycat",
                1,
                f"the previous action alone gives away {share:.1%} of the actions, and the most frequent one is "
                f"{without:.1%}: a clone that sees its last action repeats it, also its mistakes; compare with the "
                "reference `repeat`, and train with --feedback.action null",
            )


def _rewards(config: LogsConfig, table: Table, findings: Findings) -> None:
    if not config.reward:
        return
    reward_N, known_N = table.steps.reward_N, table.steps.known_N
    known = (reward_N if known_N is None else reward_N[known_N]).numpy()
    if not len(known) or known.min() == known.max():
        value = f"{known[0]:g} in all {len(known):,} rows" if len(known) else "unknown in every row"
        findings.warning(
            "constant-reward", len(known), f"column {config.reward} is {value}: nothing can be learned from it"
        )
        return
    usual = float(np.median(known))
    share = float((known == usual).mean())
    if share > RARE_REWARD:
        findings.warning(
            "rare-rewards",
            int((known != usual).sum()),
            f"column {config.reward} is {usual:g} in {share:.2%} of the rows and differs in "
            f"{int((known != usual).sum()):,}: feedback is rare, so use long windows, or a more frequent reward",
        )


def _scales(config: LogsConfig, table: Table, findings: Findings) -> None:
    names, mean, scale = table.preparation.numbers, table.preparation.mean, table.preparation.scale
    if not names:
        return
    if not config.standardise:
        obs = table.steps.obs[:SAMPLE].double()
        values = (
            obs[:, -len(names) :] if not isinstance(table.spec.obs, Named) else table.spec.obs.unpack(obs)["numbers"]
        )
        mean, scale = values.mean(0).tolist(), values.std(0).clamp_min(1e-12).tolist()
    size = [max(abs(m), s) for m, s in zip(mean, scale, strict=True)]
    worst = int(np.argmax(size))
    if size[worst] < SCALES and max(scale) < SCALES * min(scale):
        return
    sentence = (
        f"columns have very different scales: {names[worst]} has mean {mean[worst]:.4g} "
        f"and deviation {scale[worst]:.4g}"
    )
    if config.standardise:
        findings.note("raw-scales", len(names), f"{sentence}; they are standardised (domain.standardise)")
    else:
        findings.warning("raw-scales", len(names), f"{sentence}, which trains badly: set domain.standardise")


def _constant(name: str, group_N: Array, findings: Findings) -> None:
    if group_N.min() == group_N.max():
        findings.warning("constant-columns", 1, f"column {name} has 1 value: leave it out by domain.observations")


def _leaks(name: str, group_N: Array, sample: Sample, config: LogsConfig, findings: Findings) -> None:
    """Report an observed column that gives away the action, the reward, or what happens one step later."""
    if len(group_N) < FEWEST or group_N.min() == group_N.max():
        return
    advice = "if it is written after the decision, leave it out by domain.observations"
    share, without = given_away(group_N, sample.action_N)
    if share > GIVEN_AWAY and share > without + GAINED:
        findings.warning(
            "action-leak",
            1,
            f"column {name} gives the action away in {share:.1%} of rows (the most frequent action: {without:.1%}); "
            f"{advice}",
        )
    known = sample.known_N
    if known.sum() >= FEWEST and (part := explained(group_N[known], sample.reward_N[known])) > EXPLAINED:
        findings.warning(
            "reward-leak",
            1,
            f"column {name} explains {part:.1%} of the variance of {config.reward} in the same row: {advice}",
        )
    now = np.flatnonzero(sample.follows_N)
    if len(now) < FEWEST:
        return
    rewarded = now[known[now + 1]]
    if len(rewarded) >= FEWEST and (part := explained(group_N[rewarded], sample.reward_N[rewarded + 1])) > EXPLAINED:
        findings.warning(
            "next-step-leak",
            1,
            f"column {name} explains {part:.1%} of the variance of {config.reward} one step later: it may belong to "
            "the next row; shift it, or leave it out by domain.observations",
        )
    later, without = given_away(group_N[now], sample.action_N[now + 1])
    own, _ = given_away(sample.action_N[now], sample.action_N[now + 1])
    if later > GIVEN_AWAY and later > max(without, own) + GAINED:
        findings.warning(
            "next-step-leak",
            1,
            f"column {name} gives away {later:.1%} of the actions one step later: it may belong to the next row; "
            "shift it, or leave it out by domain.observations",
        )


def _confounders(config: LogsConfig, log: Log, table: Table, sample: Sample, findings: Findings) -> None:
    """Report columns without a role that are tied to both the action and the reward."""
    usable = [name for name in table.roles.unused if log.kinds[name] in ("integer", "number", "flag", "text")]
    if not config.reward or sample.known_N.sum() < FEWEST:
        return
    for name in usable:
        if log.kinds[name] == "text":
            group_N = frequent(codes(log, name)[0][sample.log_rows].astype(np.int64))
        else:
            [(_, value_N, _)] = numbers(log, [name], len(table.keys.order_N))
            value_N = value_N[sample.log_rows]
            group_N = grouped(np.where(np.isfinite(value_N), value_N, 0.0))
        with_action = cramer(group_N, sample.action_N)
        with_reward = explained(group_N[sample.known_N], sample.reward_N[sample.known_N])
        if with_action > TIED_TO_ACTION and with_reward > TIED_TO_REWARD:
            findings.warning(
                "confounding",
                1,
                f"column {name} has no role, but is tied to the action (Cramér's V {with_action:.2f}) and explains "
                f"{with_reward:.1%} of the variance of {config.reward}: if it was known at the decision, observe it; "
                "without it, an action may look good because of when it was taken",
            )


def _mismatch(config: LogsConfig, table: Table, findings: Findings) -> None:
    """Report actions whose propensities cannot be right: the mean of 1 / propensity over all rows must be 1."""
    propensity_N, action_N = table.steps.propensity_N, table.steps.action
    assert propensity_N is not None
    for i, name in enumerate(table.preparation.action_names):
        weight_N = torch.where(action_N == i, 1 / propensity_N, 0.0).double()
        mean = float(weight_N.mean())
        error = float(weight_N.std()) / len(weight_N) ** 0.5
        if abs(mean - 1) > max(OFF, SIGMAS * error):
            findings.warning(
                "propensity-mismatch",
                1,
                f"column {config.propensity} cannot be the probability of the action {name!r}: its mean weight "
                f"1 / propensity over all rows is {mean:.2f} ± {error:.2f}, and should be 1",
            )
            return
