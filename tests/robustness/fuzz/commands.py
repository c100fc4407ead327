"""Fuzz the command line within one process: every verb with hostile values in flags, names and paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import uat
from tests.robustness.fuzz.hostile import WORDS, damage_file
from tests.robustness.fuzz.run_folders import TINY, shown, tiny
from tests.robustness.fuzz.verdict import Input, Said, ask_command, first_odd_number
from uat.config import PRESETS, setting_names
from uat.paper.studies.grids import STUDIES

Argv = list[str]
LONG_BUT_RIGHT = ("train.epochs", "train.patience", "train.validate_every", "train.warmup")
"""Settings whose largest values are valid and would cause a long training."""
LONG = ("1000", "65536", "1000000", "1e12")
"""Arguments that are left out because they would cause too much work within the memory limit."""
SMALL: dict[str, dict[str, Any]] = {
    "darkroom": TINY,
    "sepsis": {"domain.horizon": 20, "train.epochs": 1, "train.batch_size": 4, "train.validation_episodes": 4},
    "markets": {"domain.days": 150, "domain.horizon": 5, "train.epochs": 1, "train.batch_size": 4},
    "movielens": {"domain.users": 60, "domain.items": 300, "domain.horizon": 5, "train.epochs": 1},
    "rule": {"domain.horizon": 5, "train.epochs": 1, "train.batch_size": 4, "train.validation_episodes": 4},
}
"""Arguments that limit a real training to tenths of a second."""


class Commands:
    name, share = "commands", 0.15

    def prepare(self, folder: Path) -> None:
        self.run, self.results, self.file = folder / "run", folder / "results", folder / "us.csv"
        uat.evaluate(uat.train(tiny("uat"), self.run))
        self.results.mkdir()
        shutil.copy(self.run / "scores.jsonl", self.results / "darkroom.jsonl")
        self.file.write_text("date,ticker,open,high,low,close,volume\n2020-01-01,AA,10,12,9,11,100\n")

    def draw(self, random: Random, folder: Path) -> Input:
        ways: tuple[tuple[int, Callable[[Random, Path], tuple[Argv, Any]]], ...] = (
            *((12, self.dry), (7, self.train), (2, self.words), (3, self.evaluate), (2, self.audit), (1, self.report)),
            *((3, self.reproduce), (2, self.data), (1, self.bench), (1, self.demo), (1, self.list)),
        )
        argv, check = random.choices([way for _, way in ways], [weight for weight, _ in ways])[0](random, folder)
        return Input("uat " + " ".join(map(repr, argv))[:400], lambda: ask_command(argv, check))

    # ------------------------------------------------------------ verbs

    def list(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        return ["list", random.choice(["methods", "recipes", *WORDS]), *more(random, ["--json"])], nothing

    def words(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        """Any arguments that do not start a training."""
        verbs = ["list", "evaluate", "audit", "report", "data", "", "--version", "tain", *WORDS]
        return [random.choice(verbs), *random.choices(WORDS, k=random.randrange(4))], nothing

    def dry(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        """A training with a dry run, where any setting may have any value."""
        domain, method, preset = names(random)
        argv = ["train", domain, "--method", method, "--preset", preset, "--dry-run"]
        flags = flags_of(domain, method)
        for _ in range(random.choice([1, 1, 2, 3])):
            argv += [random.choice(flags), random.choice(WORDS)]
        return argv, is_json

    def train(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        domain, method, preset = names(random, wrong=0.03)
        argv = ["train", domain, "--method", method, "--preset", preset if preset not in PRESETS else "smoke"]
        known = settings_of(domain, method)
        for name, value in SMALL.get(domain, {}).items():
            argv += [flag(name), str(value)] if name in known else []
        argv += ["--out", "run"]
        for _ in range(random.choice([1, 1, 2])):
            own = [name for name in known if name not in LONG_BUT_RIGHT]
            others = ["--out", "--device", "--threads", "--seed", "--source", "--preset"]
            chosen = random.choice([*others, *(flag(name) for name in own * 2)])
            value = random.choice(WORDS)
            if chosen in ("--out", "--source") and ".." in value:
                value = "x"
            if value in LONG and chosen not in ("--seed", "--out", "--source") and "lr" not in chosen:
                value = "10000000"
            argv += [chosen, value]
        return argv, lambda said: trained(folder)

    def evaluate(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        argv = ["evaluate", self.run_in(random, folder), *more(random, ["--each", "--unfinished", "--no-references"])]
        return [*argv, "--json", *hostile(random, ["--episodes", "--device", "--threads"])], shown

    def audit(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        argv = ["audit", self.run_in(random, folder), "--episodes", "4", "--draws", "1"]
        return [*argv, *hostile(random, ["--episodes", "--draws", "--device", "--threads"])], nothing

    def report(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        shutil.copytree(self.results, folder / "results")
        where = random.choice(["results", *(word for word in WORDS if ".." not in word)])
        return ["report", where, *hostile(random, ["--preset"])], nothing

    def reproduce(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        study = random.choice([*STUDIES, "all", random.choice(WORDS)])
        argv = ["reproduce", study, "--dry-run", "--preset", "smoke", "--domains", "darkroom", "--out", "out"]
        if random.random() < 0.5:
            name = random.choice([*settings_of("darkroom", "uat"), *WORDS])
            argv += ["--set", f"{name}={random.choice(WORDS)}"]
        flags = ["--seeds", "--methods", "--tasks", "--data", "--workers", "--retries", "--executor", "--threads"]
        return [*argv, *hostile(random, [*flags, "--device", "--preset", "--domains", "--address", "--set"])], nothing

    def data(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        """Commands on data, without names of published data, so that nothing is downloaded."""
        file = shutil.copy(self.file, folder / "us.csv")
        verb = random.choice(["check", "check", "prepare", "fetch", random.choice(WORDS)])
        name = random.choice(["markets", "movielens", *WORDS]) if verb != "fetch" else random.choice(WORDS)
        path = random.choice([str(file), *(word for word in WORDS if ".." not in word)])
        out = random.choice(["made.npz", *(word for word in WORDS if ".." not in word)])
        return ["data", verb, name, path, *(["--out", out] if random.random() < 0.5 else [])], nothing

    def bench(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        """Benchmarks of tiny sizes, most of which are refused."""
        argv = ["bench", "--quick", "--cases", "step", "--repeats", "1", "--methods", "vanilla"]
        flags = ["--cases", "--methods", "--device", "--precision"]
        return [*argv, random.choice(flags), random.choice([word for word in WORDS if word != "cpu"])], nothing

    def demo(self, random: Random, folder: Path) -> tuple[Argv, Any]:
        words = [word for word in WORDS if word not in ("cpu", "None")]
        return ["demo", "--out", "demo", "--device", random.choice(words), *hostile(random, ["--seed"])], nothing

    def run_in(self, random: Random, folder: Path) -> str:
        """A run folder inside the input's folder, intact or damaged, or another path."""
        how = random.random()
        if how < 0.2:
            return random.choice([word for word in WORDS if ".." not in word])
        shutil.copytree(self.run, folder / "run")
        if how > 0.6:
            files = sorted(file for file in (folder / "run").rglob("*") if file.is_file())
            damage_file(random.choice(files), random)
        return "run"


# ---------------------------------------------------------------- parts of a command


def names(random: Random, wrong: float = 0.08) -> tuple[str, str, str]:
    """Domain, method and preset, sometimes left out."""
    domain = random.choice(["darkroom", "darkroom", *uat.DOMAINS])
    method = random.choice([name for name, entry in uat.METHODS.items() if entry.serves(domain)])
    preset = random.choice(PRESETS)
    chosen = [random.choice(WORDS) if random.random() < wrong / 3 else name for name in (domain, method, preset)]
    return chosen[0], chosen[1], chosen[2]


@lru_cache(maxsize=256)
def settings_of(domain: str, method: str) -> Argv:
    known = domain in uat.DOMAINS and method in uat.METHODS and uat.METHODS[method].serves(domain)
    names_ = setting_names(uat.recipe(domain, method, "smoke")) if known else ["train.lr"]
    return [name for name in names_ if name not in ("seed",)]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags_of(domain: str, method: str) -> Argv:
    own = ["--seed", "--out", "--device", "--threads", "--source", "--no-such-flag", "--json", "--preset"]
    return [*own, *(flag(name) for name in settings_of(domain, method) * 2)]


def hostile(random: Random, flags: Argv) -> Argv:
    """Sometimes a flag with a hostile value that does not cause long work."""
    words = [word for word in WORDS if word not in LONG]
    return [random.choice(flags), random.choice(words)] if random.random() < 0.7 else []


def more(random: Random, flags: Argv) -> Argv:
    return [flag for flag in flags if random.random() < 0.3]


# ---------------------------------------------------------------- what is nonsense


def nothing(said: Said) -> None:
    return None


def is_json(said: Said) -> str | None:
    if said.out.startswith("usage: "):
        return None
    try:
        found = json.loads(said.out)
    except ValueError as error:
        return f"the output is no JSON: {error}"
    return None if "domain" in found else "no domain"


def trained(folder: Path) -> str | None:
    """Check that each remaining run has finite losses and a policy that loads."""
    for file in folder.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            if odd := first_odd_number({name: x for name, x in row.items() if name.startswith("loss/")}):
                return odd
        try:
            uat.load(file.parent)
        except ValueError as error:
            return f"its policy does not load: {error}"
    return None
