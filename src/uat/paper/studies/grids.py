"""The paper's questions as grids: which methods, in which tasks, under which settings. No code runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uat.domains import DOMAINS
from uat.methods import METHODS
from uat.paper.studies.cells import SEEDS, Cell, Filter, Sweep, merged
from uat.recipes import family


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A question of the paper: what is trained for it, and what else is measured."""

    summary: str
    sweeps: tuple[Sweep, ...] = ()
    timed: bool = False
    """Whether it measures speed and memory, which nothing else may disturb."""

    def cells(self, preset: str, seeds: Sequence[int] = (), chosen: Filter | None = None) -> list[Cell]:
        wanted = seeds or SEEDS[preset]
        return merged(cell for sweep in self.sweeps for cell in sweep.cells(preset, wanted, chosen or Filter()))

    def missing(self) -> list[str]:
        """What this version cannot run, and why."""
        return list(dict.fromkeys(said for sweep in self.sweeps if (said := sweep.missing())))


def whole(method: str) -> bool:
    """Not a variant of another."""
    return not METHODS[method].changes


def of_family(name: str) -> Callable[[str], bool]:
    return lambda method: family(method) == name


def among(*names: str) -> Callable[[str], bool]:
    return lambda method: method in names


PAIR = among("vanilla", "uat")
"""The method, and its twin without feedback."""

REWARDS: dict[str, dict[str, object]] = {
    "clean": {},
    "σ = 0.5": {"feedback.noise": 0.5},
    "σ = 1": {"feedback.noise": 1.0},
    "σ = 2": {"feedback.noise": 2.0},
    "σ = 5": {"feedback.noise": 5.0},
    "null": {"feedback.reward": "null"},
    "shuffled": {"feedback.reward": "shuffled"},
    "null, no action": {"feedback.reward": "null", "feedback.action": "null"},
    "inverted": {"feedback.reward": "inverted"},
}
"""What is told in place of a reward in the dark room, from the truth to nothing; then what is false but tells all."""
DELAYS: dict[str, dict[str, object]] = {f"d = {d}": {"domain.delay": d} for d in (0, 1, 3, 5, 10)}
"""Steps by which rewards come late in recommendation."""
WRONG: dict[str, dict[str, object]] = {name: REWARDS[name] for name in ("null", "shuffled", "inverted")}
"""At the usual delay."""
DECAYS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
WIDTHS = (4, 8, 16, 32, 64)
HANG_SENG: dict[str, object] = {"domain.test_from": "2020-01-01", "domain.days": 0}
"""All of its days, those from the shock of 2020 on held out."""
NAMED_DATA = ("hsi",)
"""Data that a user may give for one sweep alone: the Hang Seng, whose gate is looked at."""
LONG: dict[str, object] = {"method.max_positions": 151, "train.random_start": True}
"""Trained so that an episode of 150 steps is in range."""


STUDIES: dict[str, Study] = {
    "main": Study(
        summary="every method in its domains, beside the filter and the published number",
        sweeps=tuple(Sweep(domain=domain, methods=whole) for domain in DOMAINS.own),
    ),
    "ablation": Study(
        summary="UAT without each of its parts, all domains",
        sweeps=tuple(Sweep(domain=domain, methods=of_family("uat")) for domain in DOMAINS.own),
    ),
    "boundary": Study(
        summary="feedback that is noisy, late, false or absent: UAT against Vanilla, trained anew under each",
        sweeps=(
            *(
                Sweep(domain="darkroom", tasks=("gradual",), methods=PAIR, settings=settings, label=label)
                for label, settings in REWARDS.items()
            ),
            Sweep(domain="darkroom", tasks=("gradual",), methods=among("uat-no-reward")),
            *(
                Sweep(domain="movielens", methods=PAIR, settings=settings, label=label)
                for label, settings in (DELAYS | WRONG).items()
            ),
        ),
    ),
    "mechanism": Study(
        summary="where attention goes when the goal moves, what the gates tell of a market, how fast decisions follow",
        sweeps=(
            Sweep(
                domain="darkroom",
                tasks=("cyclic",),
                methods=PAIR,
                settings=LONG,
                probes=frozenset({"attention"}),
            ),
            Sweep(domain="sepsis", methods=among("vanilla", "dt", "adt", "uat"), probes=frozenset({"kinetics"})),
            Sweep(domain="markets", methods=PAIR, probes=frozenset({"gate"}), data="hsi", on_data=HANG_SENG),
        ),
    ),
    "sensitivity": Study(
        summary="how much UAT's memory and width matter on sepsis, one at a time",
        sweeps=(
            *(Sweep(domain="sepsis", methods=among("uat"), settings={"method.decay": x}, label="λ") for x in DECAYS),
            *(
                Sweep(domain="sepsis", methods=among("uat"), settings={"method.d_utility": x}, label="d_u")
                for x in WIDTHS
            ),
        ),
    ),
    "efficiency": Study(
        summary="parameters, time and memory of seven methods in the dark room",
        timed=True,
    ),
    "diagnostics": Study(
        summary="the same trainings as main, by their other metrics",
        sweeps=tuple(Sweep(domain=domain, methods=whole) for domain in DOMAINS.own),
    ),
}
TIMED = ("vanilla", "gtrxl", "tent", "cotta", "dt", "adt", "uat")
"""Methods of the table on efficiency."""


def chosen_studies(name: str) -> list[str]:
    """The study itself, or each of them for `all`."""
    return list(STUDIES) if name == "all" else [name]
