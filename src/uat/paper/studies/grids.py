"""The paper's studies as grids of methods, tasks and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from uat.domains import DOMAINS
from uat.methods import METHODS
from uat.paper.studies.binding import BINDING, BINDING_RATES, PLUS, PLUS_SEEDS, RATE_SEED
from uat.paper.studies.cells import SEEDS, Cell, Filter, Sweep, merged
from uat.recipes import family


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study of the paper: the trainings it needs, and further measurements."""

    summary: str
    sweeps: tuple[Sweep, ...] = ()
    anywhere: Callable[[str], bool] | None = None
    """Which methods the study trains in a domain that is not one of the paper's, where a user names such a domain."""
    timed: bool = False
    """Whether the study measures speed and memory, with nothing else running."""
    seeds: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SEEDS)
    """Default seeds of each preset."""

    def cells(self, preset: str, seeds: Sequence[int] = (), chosen: Filter | None = None) -> list[Cell]:
        wanted = seeds or self.seeds[preset]
        chosen = chosen or Filter()
        named = [domain for domain in chosen.domains if domain not in DOMAINS.own] if self.anywhere else []
        sweeps = [*self.sweeps, *(Sweep(domain=domain, methods=self.anywhere or is_main_method) for domain in named)]
        return merged(cell for sweep in sweeps for cell in sweep.cells(preset, wanted, chosen))

    def missing(self) -> list[str]:
        """Reasons why this version cannot run some of the sweeps."""
        return list(dict.fromkeys(reason for sweep in self.sweeps if (reason := sweep.missing())))


def is_main_method(method: str) -> bool:
    """Whether the method is not a variant of another one."""
    return not METHODS[method].ablation


def is_baseline(method: str) -> bool:
    """Whether the method is one that UAT is compared with: not a variant of UAT."""
    return is_main_method(method) and family(method) != "uat"


def with_ablations(name: str) -> Callable[[str], bool]:
    """Whether a method is this one or one of its ablations."""
    return lambda method: family(method) == name and (METHODS[method].ablation or method == name)


def among(*names: str) -> Callable[[str], bool]:
    return lambda method: method in names


def _one_setting(name: str, value: float, *, label: str) -> Sweep:
    """A point of the sensitivity study: UAT on the paper's labels with one setting changed."""
    methods = among("uat")
    return Sweep(domain="sepsis", tasks=("regimes",), methods=methods, settings={name: value}, label=label)


PAIR = among("vanilla", "uat")
"""UAT, and the same model without feedback."""
BOUNDARY = ("uat", "uat-late", "uat-plus", "adt", "adt-prev", "dt-actions", "vanilla")
"""Methods that are trained with corrupted feedback, in the order of the tables; a name that the registry does not have
is left out."""

GATED = ("uat", "uat-late", "uat-plus")
"""Methods whose comparisons with every baseline, in one task, are a family of hypotheses; likewise."""

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
"""Corruptions of the reward in the dark room, from none to complete; inverted rewards remain fully informative."""
DELAYS: dict[str, dict[str, object]] = {f"d = {d}": {"domain.delay": d} for d in (0, 1, 3, 5, 10)}
"""Delays of the reward in recommendation, in steps."""
WRONG: dict[str, dict[str, object]] = {name: REWARDS[name] for name in ("null", "shuffled", "inverted")}
"""Corruptions of the reward in recommendation, at the usual delay."""
DECAYS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
WIDTHS = (4, 8, 16, 32, 64)
HANG_SENG: dict[str, object] = {"domain.test_from": "2020-01-01", "domain.days": 0}
"""Use all days, and hold out those from the shock of 2020 on."""
NAMED_DATA = ("hsi",)
"""Names of data for a single sweep: hsi is the Hang Seng index, for the figure of the gate."""
LONG: dict[str, object] = {"method.max_positions": 151, "train.random_start": True}
"""Training settings that cover episodes of 150 steps."""


STUDIES: dict[str, Study] = {
    "main": Study(
        summary="every method in its domains, compared with the Bayes filter and the published numbers",
        sweeps=tuple(Sweep(domain=domain, methods=is_main_method) for domain in DOMAINS.own),
        anywhere=is_main_method,
    ),
    "ablation": Study(
        summary="UAT without each of its parts, in all domains",
        sweeps=tuple(Sweep(domain=domain, methods=with_ablations("uat")) for domain in DOMAINS.own),
        anywhere=with_ablations("uat"),
    ),
    "boundary": Study(
        summary="methods trained with feedback that is noisy, late, false or absent, beside the filter of each",
        sweeps=(
            *(
                Sweep(domain="darkroom", tasks=("gradual",), methods=among(*BOUNDARY), settings=settings, label=label)
                for label, settings in REWARDS.items()
            ),
            Sweep(domain="darkroom", tasks=("gradual",), methods=among("uat-no-reward")),
            *(
                Sweep(domain="movielens", methods=among(*BOUNDARY), settings=settings, label=label)
                for label, settings in (DELAYS | WRONG).items()
            ),
        ),
    ),
    "binding": Study(
        summary="updates until feedback is bound to its observation: tokens by gates, on rule (ours)",
        sweeps=BINDING,
        seeds={**SEEDS, "paper": (0, 1, 2, 3, 4)},
    ),
    "binding-rates": Study(
        summary="the learning rate of each way of binding, chosen on a seed of its own (ours)",
        sweeps=BINDING_RATES,
        seeds=dict.fromkeys(SEEDS, (RATE_SEED,)),
    ),
    "plus": Study(
        summary="the gates and tokens of uat-plus, chosen by validation on rule, on seeds of their own (ours)",
        sweeps=PLUS,
        seeds=dict.fromkeys(SEEDS, PLUS_SEEDS),
    ),
    "mechanism": Study(
        summary="attention after a shift of the goal, gates by market regime, and the speed of adaptation",
        sweeps=(
            Sweep(
                domain="darkroom",
                tasks=("cyclic",),
                methods=PAIR,
                settings=LONG,
                probes=frozenset({"attention", "terms"}),
            ),
            Sweep(
                domain="sepsis",
                tasks=("regimes",),
                methods=among("vanilla", "dt", "adt", "uat"),
                probes=frozenset({"kinetics"}),
            ),
            Sweep(domain="markets", methods=PAIR, probes=frozenset({"gate"}), data="hsi", on_data=HANG_SENG),
        ),
    ),
    "sensitivity": Study(
        summary="effect of UAT's feedback memory and utility width on sepsis, one at a time",
        sweeps=(
            *(_one_setting("method.feedback_decay", x, label="λ") for x in DECAYS),
            *(_one_setting("method.d_utility", x, label="d_u") for x in WIDTHS),
        ),
    ),
    "efficiency": Study(
        summary="parameters, time and memory of seven methods in the dark room",
        timed=True,
    ),
    "diagnostics": Study(
        summary="the trainings of main, by their other metrics",
        sweeps=tuple(Sweep(domain=domain, methods=is_main_method) for domain in DOMAINS.own),
        anywhere=is_main_method,
    ),
}
TIMED = ("vanilla", "gtrxl", "tent", "cotta", "dt", "adt", "uat")
"""Methods in the table of efficiency."""


def chosen_studies(name: str) -> list[str]:
    """The name itself, or the names of all studies for `all`."""
    return list(STUDIES) if name == "all" else [name]
