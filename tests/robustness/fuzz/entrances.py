"""Fuzz the Python functions for users with arguments of wrong types, shapes and values."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import uat
from tests.builders import SPECS, build, build_random, random_trajectory, served
from tests.robustness.fuzz.hostile import odd_tensor, scalar
from tests.robustness.fuzz.run_folders import tiny
from tests.robustness.fuzz.verdict import Input, Verdict, ask
from uat.config import setting_names
from uat.evaluation.auditing import audit_run
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

METHODS = [name for name in uat.METHODS if name not in ("cadm", "deeptrader", "sarl", "iql")]


class Entrances:
    name, share = "entrances", 0.35

    def prepare(self, folder: Path) -> None:
        self.run = folder / "run"
        uat.train(tiny("uat"), self.run)
        self.policies: dict[tuple[str, str], uat.Policy] = {}

    def policy(self, method: str, spec: str) -> uat.Policy:
        """A cached policy, since building one takes longer than running it."""
        if (method, spec) not in self.policies:
            self.policies[method, spec] = build_random(method, SPECS[spec], dtype=torch.float32)
        return self.policies[method, spec]

    def draw(self, random: Random, folder: Path) -> Input:
        ways = (*[self.episodes] * 5, *[self.act] * 5, self.session, self.restart, self.spec, self.override, self.load)
        ways = (*ways, self.save, self.train, self.evaluate, self.build, self.corrupt, self.recipe, self.spec)
        return random.choice(ways)(random, folder)

    # ------------------------------------------------------------ logs and sessions

    def episodes(self, random: Random, folder: Path) -> Input:
        name = random.choice(list(SPECS))
        spec, policy = SPECS[name], self.policy("uat", name)
        good = random_trajectory(spec, seed=random.randrange(99))
        given: dict[str, Any] = {
            key: getattr(good, key) for key in ("obs", "action", "reward", "target", "valid", "allowed")
        }
        if isinstance(spec.obs, Items):
            given["obs"] = given["obs"].clamp_min(0)
        if given["allowed"] is not None:
            given["allowed"] = given["allowed"] | (given["target"] > 0)
        given = {key: value for key, value in given.items() if value is not None}
        wrong = random.sample(list(given), random.choice([1, 1, 1, 2]))
        said = []
        for key in wrong:
            how, given[key] = odd_tensor(given[key], random)
            said.append(f"{key} {how}")

        def check(found: Any) -> str | None:
            if spec.facts or found.valid.shape[1] > spec.horizon:
                return None
            batch = spec.clock.batch(found)
            with torch.no_grad():
                loss, count = policy.loss(batch)["imitation"]
                logits = policy.logits(batch)[found.valid]
            odd = not loss.isfinite() or logits.isnan().any() or not logits.amax(-1).isfinite().all()
            return f"the loss is {float(loss)} of {float(count)} steps" if odd else None

        names = ("reward", *given)  # a wrong mask makes others wrong
        return Input(f"episodes({name}) with {said}", lambda: ask(lambda: uat.episodes(spec, **given), names, check))

    def opened(self, random: Random) -> tuple[uat.Session, str]:
        method = random.choice(["uat", "uat", "vanilla", *METHODS])
        specs = [name for name, spec in SPECS.items() if uat.METHODS[method].policy.unsupported_reason(spec) is None]
        name = random.choice(specs)
        path = random.choice(["auto", "cached"])
        return uat.Session(self.policy(method, name), streams=3, capacity=7, path=path), f"{method} {name} {path}"  # pyright: ignore[reportArgumentType]

    def act(self, random: Random, folder: Path) -> Input:
        """Steps of a session, some of them odd: after a refusal it continues with the next good step."""
        session, what = self.opened(random)
        good = random_trajectory(session.spec, seed=random.randrange(99), whole=True, masked=False)
        steps, said = [], []
        for t in range(4):
            given: dict[str, Any] = {"obs": good.obs[:, t], "reward": good.reward[:, t], "action": good.action[:, t]}
            if isinstance(session.spec.obs, Items):
                given["obs"] = given["obs"].clamp_min(0)
            given["allowed"] = torch.ones(3, session.spec.action.count, dtype=torch.bool)
            for key in random.sample(list(given), random.choice([0, 0, 1, 2])):
                del given[key]
                if key == "obs":
                    given[key] = good.obs[:, t].clamp_min(0) if isinstance(session.spec.obs, Items) else good.obs[:, t]
            wrong = [] if t == 3 else random.sample(list(given), random.choice([0, 1, 1, 2]) % (len(given) + 1))
            for key in wrong:
                how, given[key] = odd_tensor(given[key], random)
                said.append(f"step {t}: {key} {how}")
            steps.append((given, wrong))

        def judge() -> Verdict:
            verdicts = []
            for given, wrong in steps:
                one = ask(lambda given=given: session.act(**given), (*wrong, "reward"), lambda x: decided(x, session))
                if one.kind == "broken":
                    return one
                forgot = "not finite" in one.said
                if one.kind == "refused" and not wrong and "reward" in given and not forgot:
                    return Verdict("broken", f"a good step was refused: {one.said}")
                verdicts.append(one)
            refused = [one for one in verdicts if one.kind == "refused"]
            return refused[0] if refused else verdicts[0]

        return Input(f"Session({what}).act with {said}", judge)

    def session(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"policy": self.policy("uat", "vector-discrete")}
        wrong = random.choice(["policy", "streams", "capacity", "path", "threads"])
        given[wrong] = scalar(random)
        if wrong == "policy" and random.random() < 0.5:
            given[wrong] = odd_policy(random)
        return Input(
            f"Session with {wrong} {type(given[wrong])} {safe(given[wrong])}",
            lambda: ask(
                lambda: uat.Session(given.pop("policy"), **given),
                (wrong,),
                lambda s: (
                    decided(s.act(torch.zeros(s.streams, 5), reward=[0.0] * s.streams), s) if s.streams < 99 else None
                ),
            ),
        )

    def restart(self, random: Random, folder: Path) -> Input:
        session, what = self.opened(random)
        good = random.choice([torch.tensor([0, 2]), torch.tensor([True, False, True])])
        how, streams = odd_tensor(good, random)
        obs = random_trajectory(session.spec, whole=True).obs[:, 0]
        obs = obs.clamp_min(0) if isinstance(session.spec.obs, Items) else obs

        def again(_: Any) -> str | None:
            return decided(session.act(obs, reward=torch.zeros(3)), session)

        return Input(f"restart({what}) {how}", lambda: ask(lambda: session.restart(streams), ("restart",), again))

    # ------------------------------------------------------------ specs and configs

    def spec(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {
            "obs": Vector(3),
            "action": Discrete(3),
            "horizon": 4,
            "reward_scale": 1.0,
            "reward_lag": 1,
            "facts": {},
        }
        wrong = random.choice([*given, "kind"])
        if wrong == "kind":
            kind = random.choice([Vector, Items, Discrete, Weights, Assets])
            value = scalar(random)
            args = (value, 2) if kind is Assets else (value,)
            return Input(f"{kind.__name__}({safe(value)})", lambda: ask(lambda: kind(*args), (kind.__name__,)))
        given[wrong] = scalar(random) if wrong != "facts" else {scalar_key(random): scalar(random)}
        return Input(f"Spec with {wrong} {safe(given[wrong])}", lambda: ask(lambda: Spec(**given), (wrong,)))

    def override(self, random: Random, folder: Path) -> Input:
        method = random.choice(list(uat.METHODS))
        domain = random.choice([d for d in uat.DOMAINS if uat.METHODS[method].serves(d)])
        config = uat.recipe(domain, method, "smoke")
        name = random.choice([*setting_names(config), "domain", "preset", "no.such", "", "domain.", "."])
        value = scalar(random)
        changes = {name: value} if random.random() < 0.9 else value
        names = (name, name.split(".")[-1]) if changes is not value else ("changes",)
        return Input(
            f"override({domain}, {method}) {name}={safe(value)}",
            lambda: ask(lambda: uat.override(config, changes), names),
        )

    def recipe(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"domain": "darkroom", "method": "uat", "preset": "smoke", "seed": 0}
        wrong = random.choice(list(given))
        given[wrong] = scalar(random)
        return Input(f"recipe with {wrong} {safe(given[wrong])}", lambda: ask(lambda: uat.recipe(**given), (wrong,)))

    def build(self, random: Random, folder: Path) -> Input:
        """A policy with odd settings, which acts if it can be built."""
        method = random.choice(METHODS)
        spec = served(method)
        good = build(method, spec).config
        item = random.choice(dataclasses.fields(good))
        value = scalar(random)
        return Input(
            f"{method} with {item.name} {safe(value)}",
            lambda: ask(
                lambda: uat.METHODS[method].build(spec, dataclasses.replace(good, **{item.name: value})), (item.name,)
            ),
        )

    def corrupt(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"noise": 0.1, "delay": 1, "episode_ids": None, "seed": 0}
        names = [*(item.name for item in dataclasses.fields(uat.FeedbackConfig)), "episode_ids", "seed", "what"]
        wrong, value = random.choice(names), scalar(random)
        what: Any = random_trajectory(SPECS["vector-discrete"])
        if wrong == "what":
            what = value
        else:
            given[wrong] = value
        return Input(f"corrupt with {wrong} {safe(value)}", lambda: ask(lambda: uat.corrupt(what, **given), (wrong,)))

    # ------------------------------------------------------------ files and runs

    def load(self, random: Random, folder: Path) -> Input:
        value = scalar(random)
        return Input(f"load({safe(value)})", lambda: ask(lambda: uat.load(value), ("path", *path_words(value))))

    def save(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"path": "policy.safetensors", "policy": self.policy("uat", "vector-discrete")}
        given |= {"method_name": "uat", "weights": None, "domain": None}
        wrong = random.choice(list(given))
        given[wrong] = scalar(random)
        if isinstance(given["path"], str) and ".." in given["path"]:
            given["path"] = "x"
        if wrong == "policy" and random.random() < 0.6:
            given[wrong] = odd_policy(random)
        path = given["path"]
        return Input(
            f"save with {wrong} {safe(given[wrong])}",
            lambda: ask(lambda: uat.save(**given), (wrong, "weight", *path_words(path)), lambda _: loads(path)),
        )

    def train(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"config": tiny("vanilla"), "out": "out", "resume": False, "source": None}
        given |= {"device": "cpu", "threads": 1, "progress": None}
        wrong = random.choice(list(given))
        given[wrong] = outside_removed(scalar(random))
        words = path_words(given[wrong]) if wrong in ("out", "source") else ()
        return Input(
            f"train with {wrong} {safe(given[wrong])}",
            lambda: ask(lambda: uat.train(**given), (wrong, *words), lambda run: loads(run.path)),
        )

    def evaluate(self, random: Random, folder: Path) -> Input:
        given: dict[str, Any] = {"run": self.run, "episodes": 4, "references": False, "device": None, "threads": None}
        wrong = random.choice(["run", "episodes", "device", "threads"])
        given[wrong] = outside_removed(scalar(random))
        audits = random.random() < 0.4
        if wrong != "run":
            given["run"] = copied(self.run, folder)
        call: Callable[..., Any] = uat.evaluate
        if audits:
            del given["references"]
            call = audit_run
        words = path_words(given["run"])
        return Input(
            f"{call.__name__} with {wrong} {safe(given[wrong])}", lambda: ask(lambda: call(**given), (wrong, *words))
        )


# ---------------------------------------------------------------- checks and parts


def decided(answer: torch.Tensor, session: uat.Session) -> str | None:
    """Describe what is invalid in a decision; None if nothing is."""
    count = session.spec.action.count
    if isinstance(session.spec.action, Discrete):
        fits = answer.shape == (session.streams,) and bool(((answer >= 0) & (answer < count)).all())
    else:
        fits = answer.shape == (session.streams, count) and bool(answer.isfinite().all())
        fits = fits and bool(((answer.sum(-1) - 1).abs() < 1e-3).all() and (answer >= 0).all())
    return None if fits else f"the decision is {answer.tolist()}"


def loads(path: Any) -> str | None:
    try:
        uat.load(path)
    except ValueError as error:
        return f"what was written cannot be read: {error}"
    return None


def odd_policy(random: Random) -> Any:
    policy = build("uat", SPECS["vector-discrete"], dtype=torch.float32)
    how = random.randrange(6)
    if how == 0:
        return policy.to("meta")
    if how == 1:
        return type(policy)
    if how == 2:
        return torch.nn.Linear(2, 2)
    if how == 3:
        return policy.to(torch.complex64)
    with torch.no_grad():
        next(policy.parameters()).view(-1)[0] = random.choice([float("nan"), float("inf"), 1e38])
    return policy if how == 4 else copy.deepcopy(policy).half()


def scalar_key(random: Random) -> Any:
    value = scalar(random)
    try:
        hash(value)
    except TypeError:
        return "x"
    return value


def safe(value: Any) -> str:
    try:
        return repr(value)[:60]
    except Exception:
        return f"<{type(value).__name__}>"


def path_words(value: Any) -> tuple[str, ...]:
    """Names that an error sentence about a path may use."""
    return (str(value)[:40] or ".",) if isinstance(value, str | Path) else ()


def outside_removed(value: Any) -> Any:
    """A path from a caller may lead anywhere; in the campaign it stays inside the folder."""
    return "inside" if isinstance(value, str) and ".." in value else value


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"
