"""The sepsis world once more, one patient and one number at a time, written from its equations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product

from uat.domains.sepsis import SepsisConfig

State = tuple[float, float, float]
"""SOFA, lactate, mean arterial pressure."""
LEVELS = [(0.17, 0.1), (0.17, 0.5), (0.83, 0.2), (0.17, 0.9), (0.83, 0.8)]


def effect(regime: int, action: int, task: str = "regimes") -> float:
    v, f = LEVELS[action]
    if task == "aligned":
        return [0.6 * f - 0.25 * v - 0.25, 0.4 * v + 0.35 * f - 0.1, 0.65 - 0.5 * (v + f)][regime]
    return [f + 0.1 * v - 0.45, 1.2 * v - 0.5 * f - 0.35, 0.55 - 1.1 * (v + f)][regime]


def repeats(actions: list[int]) -> int:
    """How often the last action was given in a row."""
    count = 1
    while count < len(actions) and actions[-count - 1] == actions[-1]:
        count += 1
    return count


def expected(state: State, regime: int, actions: list[int], config: SepsisConfig) -> State:
    """The state after the last of these actions, without noise and limits."""
    e = effect(regime, actions[-1], config.task)
    if config.task == "regimes" and e > 0 and repeats(actions) > 3:
        e *= config.resistance ** (repeats(actions) - 3)
    sofa, lactate, pressure = state
    k = config.response
    return (sofa - 0.7 * k * e + 0.05 * (0.5 - sofa), lactate - k * e + 0.05 * (0.5 - lactate), pressure + k * e)


def reward(old: State, new: State, fate: float) -> tuple[float, bool]:
    """Return the reward of the step, and whether it was the last."""
    earned = 0.1 * (old[0] - new[0]) + 0.05 * (old[1] - new[1])
    if new[0] > 0.85 and new[1] > 0.7 and fate < 0.01:
        return earned - 1, True
    if new[0] < 0.3 and new[1] < 0.3 and fate < 0.02:
        return earned + 1, True
    return earned, False


def chance(new: State, mean: State, noise: float) -> float:
    """Density of the new state; at a limit, the chance of reaching beyond it."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    total = 1.0
    for x, m in zip(new, mean, strict=True):
        if x <= 0:
            total *= below((0 - m) / noise)
        elif x >= 1:
            total *= below((m - 1) / noise)
        else:
            total *= math.exp(-0.5 * ((x - m) / noise) ** 2)
    return total


def schedules(config: SepsisConfig) -> Iterator[tuple[list[int], float]]:
    """Every sequence of regimes of an episode, with its chance. Equal sequences may come several times."""
    counts = range(config.min_segments, config.max_segments + 1)
    for count in counts:
        for lengths in compositions(config.horizon, count, config.min_length):
            share = dirichlet_multinomial([n - config.min_length for n in lengths], config.evenness)
            for path in product(range(3), repeat=count):
                if all(a != b for a, b in pairwise(path)):
                    regimes = [r for r, n in zip(path, lengths, strict=True) for _ in range(n)]
                    yield regimes, share / len(counts) / (3 * 2 ** (count - 1))


def compositions(total: int, parts: int, least: int) -> Iterator[list[int]]:
    if parts == 1:
        if total >= least:
            yield [total]
        return
    for first in range(least, total + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield [first, *rest]


def dirichlet_multinomial(counts: list[int], a: float) -> float:
    n, total = sum(counts), a * len(counts)
    log = math.lgamma(n + 1) + math.lgamma(total) - math.lgamma(n + total)
    return math.exp(log + sum(math.lgamma(x + a) - math.lgamma(a) - math.lgamma(x + 1) for x in counts))


def posterior(states: list[State], actions: list[int], config: SepsisConfig) -> list[float]:
    """Chance of each regime now: states up to now, and all actions before."""
    weight = [0.0, 0.0, 0.0]
    for regimes, prior in schedules(config):
        for t in range(len(actions)):
            mean = expected(states[t], regimes[t], actions[: t + 1], config)
            prior *= chance(states[t + 1], mean, config.state_noise)
        weight[regimes[len(actions)]] += prior
    return [w / sum(weight) for w in weight]
