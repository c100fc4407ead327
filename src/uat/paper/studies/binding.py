"""The study of binding: how soon a policy connects feedback with the observation that it answers.

Two things differ between methods: what a token holds, which decides whether a reward stands beside the observation it
answers (alignment), and whether feedback also gates attention. The study trains their product on `rule`, whose hidden
rule only shows in pairs of an observation and its reward, and counts updates.

  tokens    observation, with the previous one, with feedback, with the previous transition, two a step
  gates     none; none, but with UAT's encoder of feedback in the tokens; the paper's (early); late

The primary endpoint is the number of updates until validation accuracy has gone 80 % of the way from chance to that of
the Bayes filter. Every way of binding learns at the rate that was best for it in `binding-rates`, on a seed of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from uat.methods import METHODS
from uat.paper.studies.cells import Sweep

TOKENS = ("observation", "previous", "feedback", "transition", "two")
GATES = ("none", "none, encoded", "early", "late")
WIDTHS = (5, 10, 20)
"""Widths of the observation."""
DEFAULT_WIDTH = 10
"""The domain's own width, which other worlds have; their ways learn at the rates chosen for it."""
RATES = (3e-4, 1e-3, 3e-3)
"""Learning rates among which each way of binding has its own."""
RATE_SEED = 100
"""Seed of the trainings that choose the rates."""
PLUS_SEEDS = (200, 201)
"""Seeds of the trainings that choose the gates and tokens of `uat-plus`."""
SHARES = (0.5, 0.8)
"""Shares of the way from chance to the filter; the last one is the primary endpoint."""
OTHER_WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "label noise 0.1": ("fixed", {"domain.label_noise": 0.1}),
    "payoff": ("fixed", {"domain.reward": "payoff"}),
    "flips": ("flip", {}),
}
"""Label -> task and settings of the worlds in which some ways are compared at the domain's own width."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of binding: the content of tokens, and the gates."""

    tokens: str
    gates: str

    @property
    def method(self) -> str:
        """The method of the registry, whose row it is if no setting changes."""
        if self.gates == "none":
            return {"observation": "vanilla", "transition": "adt-prev", "two": "dpt"}.get(self.tokens, "adt")
        return {"early": "uat", "late": "uat-late"}.get(self.gates, "adt")

    @property
    def settings(self) -> dict[str, Any]:
        if self.gates == "none, encoded":
            return {"method.tokens": self.tokens, "method.token_feedback": "encoder"}
        return {} if self.method in ("vanilla", "adt-prev", "dpt") else {"method.tokens": self.tokens}

    def sweep(self, label: str, settings: dict[str, Any], task: str = "fixed") -> Sweep:
        method = self.method
        return Sweep(
            domain="rule",
            tasks=(task,),
            methods=lambda name: name == method,
            settings={**self.settings, **settings},
            label=label,
        )


WAYS = tuple(
    Way(tokens, gates)
    for tokens in TOKENS
    for gates in GATES
    if gates != "none, encoded" or tokens in ("feedback", "transition", "two")
)
"""All ways; encoded feedback needs tokens that hold feedback."""
ELSEWHERE = tuple(
    Way(*pair)
    for pair in (
        ("feedback", "none"),
        ("transition", "none"),
        ("two", "none"),
        ("observation", "early"),
        ("observation", "late"),
        ("transition", "early"),
        ("transition", "late"),
    )
)
"""Ways that are compared in other worlds, too."""
PLUS_WAYS = tuple(
    Way(tokens, gates) for tokens in ("observation", "previous", "transition") for gates in ("early", "late")
)
"""Ways among which `uat-plus` is chosen."""

CHOSEN_RATES: dict[tuple[str, str, int], float] = {}
"""(tokens, gates, width) -> best rate, from the table of `uat reproduce binding-rates`; absent: the recipe's 1e-3."""


def gated_way(method: str) -> Way:
    """The way of binding that a method with gates is."""
    config = METHODS[method].configure()
    return Way(config.tokens, config.binding)


def main_sweep(way: Way, width: int) -> Sweep:
    """The trainings of a way at one width of the observation, at its own rate."""
    return way.sweep(f"d_o = {width}", {"domain.d_obs": width, **_own_rate(way, width)})


def rate_sweep(way: Way, width: int, rate: float) -> Sweep:
    return way.sweep(f"d_o = {width}, rate {rate:g}", {"domain.d_obs": width, "train.lr": rate})


def world_sweep(way: Way, label: str) -> Sweep:
    task, settings = OTHER_WORLDS[label]
    return way.sweep(label, {**settings, **_own_rate(way, DEFAULT_WIDTH)}, task)


def _own_rate(way: Way, width: int) -> dict[str, Any]:
    rate = CHOSEN_RATES.get((way.tokens, way.gates, width))
    return {} if rate is None else {"train.lr": rate}


BINDING = (
    *(main_sweep(way, width) for width in WIDTHS for way in WAYS),
    *(world_sweep(way, label) for label in OTHER_WORLDS for way in ELSEWHERE),
)
PLUS = tuple(main_sweep(way, width) for width in WIDTHS for way in PLUS_WAYS)
BINDING_RATES = tuple(rate_sweep(way, width, rate) for width in WIDTHS for way in WAYS for rate in RATES)
