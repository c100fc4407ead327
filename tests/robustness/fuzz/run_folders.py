"""Fuzz damaged run folders: load, act, score, resume, or use as a source."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import uat
from tests.robustness.fuzz.hostile import damage_file
from tests.robustness.fuzz.verdict import Check, Input, ask, ask_command, first_odd_number
from uat.evaluation.auditing import audit_run

TINY = {
    "domain.size": 4,
    "domain.horizon": 6,
    "domain.num_worlds": 4,
    "method.d_model": 8,
    "method.d_ff": 8,
    "train.epochs": 4,
    "train.batch_size": 4,
    "train.validation_episodes": 4,
    "evaluation.episodes": 4,
    "method.num_layers": 1,
}
"""Settings of a dark room in which everything takes milliseconds."""


class StoppedError(Exception):
    """Raised in the middle of a training, to leave it unfinished."""


def tiny(method: str, **changes: Any) -> uat.RunConfig:
    return uat.override(uat.recipe("darkroom", method, "smoke"), {**TINY, **changes})


def train_half(config: uat.RunConfig, out: Path) -> None:
    """A run that was stopped after its second epoch."""
    from uat.training.checkpoint import Checkpoint

    save, Checkpoint.save = Checkpoint.save, save_and_stop(Checkpoint.save)
    try:
        uat.train(config, out)
    except StoppedError:
        pass
    finally:
        Checkpoint.save = save


def save_and_stop(save: Callable[..., Any]) -> Callable[..., Any]:
    def stop(self: Any, *args: Any, **kwargs: Any) -> None:
        self.saved_at = -math.inf
        save(self, *args, **kwargs)
        raise StoppedError

    return stop


class RunFolders:
    name, share = "run folders", 0.12

    def prepare(self, folder: Path) -> None:
        self.folder = folder
        for method in ("uat", "vanilla"):
            uat.evaluate(uat.train(tiny(method), folder / method))
        train_half(tiny("uat"), folder / "half")

    def draw(self, random: Random, folder: Path) -> Input:
        base = random.choice(["uat", "vanilla", "half", "half"])
        run = folder / "run"
        shutil.copytree(self.folder / base, run)
        done = []
        for _ in range(random.choice([1, 1, 1, 2])):
            files = sorted(file for file in run.rglob("*") if file.is_file() and "tensorboard" not in file.parts)
            done.append(damage_file(random.choice(files), random))
        name = random.choice(list(ASKED))
        return Input(f"{name} of {base} with {', '.join(done)}", lambda: ASKED[name](run))


def acts(policy: uat.Policy) -> str | None:
    session = uat.Session(policy)
    obs = torch.zeros(1, 10)
    answers = [session.act(obs), session.act(obs, reward=[0.0])]
    return None if all(0 <= int(answer) < 5 for answer in answers) else f"it acts {answers}"


def scored(found: Any) -> str | None:
    return first_odd_number({row.metric: row.value for row in found.scores if row.metric == "accuracy"})


def resumed(run: uat.Run) -> str | None:
    rows = run.rows("metrics.jsonl")
    numbers = {name: value for name, value in rows[-1].items() if name.startswith(("loss/", "validation/acc"))}
    return first_odd_number(numbers) or acts(uat.load(run.path))


def resume(run: Path) -> Any:
    """Resume with the known config; a training must not overwrite files that it cannot read."""
    method = "vanilla" if "vanilla" in (run / "config.json").read_text(errors="replace") else "uat"
    return uat.train(tiny(method), run, resume=True)


def shown(said: Any) -> str | None:
    if said.out.startswith("usage: "):
        return None
    rows = json.loads(said.out)
    values = {f"{row['method']} {row['metric']}": row["value"] for row in rows if row.get("metric") == "accuracy"}
    return first_odd_number(values)


def asked(call: Callable[[Path], Any], check: Check = lambda result: None) -> Callable[[Path], Any]:
    return lambda run: ask(lambda: call(run), (str(run), "run"), check)


ASKED: dict[str, Callable[[Path], Any]] = {
    "load": asked(uat.load, acts),
    "load the file": asked(lambda run: uat.load(run / "policy.safetensors"), acts),
    "evaluate": asked(lambda run: uat.evaluate(run, references=False), scored),
    "evaluate unfinished": asked(lambda run: uat.evaluate(run, unfinished=True, references=False), scored),
    "resume": asked(resume, resumed),
    "source": asked(lambda run: uat.train(tiny("tent"), run.parent / "tent", source=run), resumed),
    "audit": asked(lambda run: audit_run(run, episodes=4, draws=1)),
    "uat evaluate": lambda run: ask_command(["evaluate", str(run), "--json", "--unfinished"], shown),
    "uat audit": lambda run: ask_command(["audit", str(run), "--episodes", "4", "--draws", "1"]),
}
