"""Parts shared by the tests: small specs of every kind, random episodes, random weights, and a step-by-step player.

Axes as in `uat.episode`. Sizes differ from axis to axis, so that two axes mixed up do not fit by luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from uat.clock import NO_ACTION
from uat.config import RunConfig
from uat.episode import Batch, Step, Trajectory
from uat.methods import METHODS, Policy
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.runs import Run, save_policy
from uat.spec import Assets, Box, Discrete, Items, Named, Observations, Spec, Vector, Weights
from uat.training.surroundings import seeded

Module = TypeVar("Module", bound=nn.Module)
CPU = torch.device("cpu")

SPECS: dict[str, Spec] = {
    "vector-discrete": Spec(obs=Vector(5), action=Discrete(4), horizon=7),
    "vector-weights": Spec(obs=Vector(5), action=Weights(4), horizon=7, reward_scale=50.0),
    "items-discrete": Spec(obs=Items(11), action=Discrete(11), horizon=7, reward_lag=2),
    "items-weights": Spec(obs=Items(11), action=Weights(4), horizon=7),
    "assets-discrete": Spec(obs=Assets(3, 2), action=Discrete(4), horizon=7, reward_scale=0.5),
    "assets-weights": Spec(obs=Assets(3, 2), action=Weights(4), horizon=7, reward_lag=3, facts={"relative": (4,)}),
}
"""Every kind of plain observation with ids and with weights, one with facts that methods may ask for."""

OPEN_SPECS: dict[str, Spec] = {
    "vector-box": Spec(obs=Vector(5), action=Box(low=(-1.0, 0.0), high=(1.0, 5.0)), horizon=7),
    "named-discrete": Spec(
        obs=Named({"place": Vector(3), "item": Items(6), "rows": Assets(2, 2)}), action=Discrete(4), horizon=7
    ),
}
"""Problems that fast engines leave to the plain one: dictionary observations, and actions in a box."""

ALL_SPECS = SPECS | OPEN_SPECS

PAIRS = {
    (method, spec): METHODS[method].policy.unsupported_reason(ALL_SPECS[spec])
    for method in METHODS
    for spec in ALL_SPECS
}
"""(method, kind of problem) -> why the method does not support the problem, or None."""

IN_THE_DARK = [name for name, method in METHODS.items() if method.serves("darkroom")]
"""Methods that serve the dark room, where most tests play."""

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}

LARGE = Spec(obs=Items(60_000), action=Discrete(60_000), horizon=4)
"""A catalogue as large as a recommender's."""

SIZES: dict[str, Any] = {
    "d_model": 12,
    "num_heads": 3,
    "num_layers": 2,
    "d_ff": 10,
    "dropout": 0.0,
    "d_utility": 5,
    "d_action": 3,
    "d_hidden": 8,
}
"""Small settings; each config takes those that it has."""


def crossed(mark: pytest.MarkDecorator, *axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """Parameters for every combination of values; those in which two values or more are not the first of their axis
    are marked. So every value is met without the mark, and every combination with it.
    """
    named = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes]
    firsts = [next(iter(axis)) for axis in named]
    found = []
    for names in itertools.product(*named):
        values = [axis[name] for axis, name in zip(named, names, strict=True)]
        others = sum(name != first for name, first in zip(names, firsts, strict=True))
        found.append(pytest.param(*values, id="-".join(names), marks=[mark] if others > 1 else []))
    return found


def interpreted(*case: Any) -> Any:
    """A case of a kernel that takes the interpreter seconds."""
    return pytest.param(*case, marks=pytest.mark.kernels)


# ---------------------------------------------------------------- policies


def served(method: str) -> Spec:
    """The first kind of problem that a method serves."""
    return next(ALL_SPECS[spec] for (name, spec), reason in PAIRS.items() if name == method and not reason)


def small_config(method: str, **settings: Any) -> Any:
    entry = METHODS[method]
    known = {item.name for item in fields(entry.config)}
    return entry.configure(**{**{name: size for name, size in SIZES.items() if name in known}, **settings})


def build(method: str, spec: Spec, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Policy:
    """A small policy with its first weights, ready to act."""
    with seeded(0, CPU):
        return METHODS[method].build(spec, small_config(method, **settings)).to(dtype).eval()


def build_random(
    method: str, spec: Spec, *, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any
) -> Policy:
    return randomise(build(method, spec, dtype=dtype, **settings), seed)


def build_uat(spec: Spec, *, dtype: torch.dtype = torch.float64, **settings: Any) -> UAT:
    with seeded(0, CPU):
        return UAT(spec, UATConfig(**{**SIZES, **settings})).to(dtype).eval()


@torch.no_grad()
def randomise(module: Module, seed: int) -> Module:
    """Draw every parameter again, so that nothing is zero by initialisation; gates end up open, and not saturated."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() > 1:
            draw = draw / parameter.shape[-1] ** 0.5
        elif name.endswith("weight"):
            draw = 1 + 0.2 * draw  # a norm's scale
        else:
            draw = 0.3 * draw
        parameter.copy_(draw)
    return module


def vanilla_of(uat: UAT) -> Vanilla:
    """Vanilla with a UAT's base weights, which are the first rows of its projections."""
    settings = {item.name: getattr(uat.config, item.name) for item in fields(VanillaConfig)}
    vanilla = Vanilla(uat.spec, VanillaConfig(**settings)).to(next(uat.parameters()).dtype).eval()
    weights = uat.state_dict()
    vanilla.load_state_dict({name: weights[name][: len(own)] for name, own in vanilla.state_dict().items()})
    return vanilla


def untrained(config: RunConfig, folder: Path) -> Run:
    """A run folder whose policy has its first weights."""
    run = Run.create(config, folder)
    with seeded(config.seed, CPU):
        policy = METHODS[config.method_name].build(config.build_domain().spec, config.method)
    save_policy(run.file("policy.safetensors"), policy, config.method_name, domain=config.domain)
    return run


# ---------------------------------------------------------------- episodes


def random_trajectory(
    spec: Spec,
    *,
    episodes: int = 3,
    steps: int | None = None,
    seed: int = 0,
    masked: bool | None = None,
    whole: bool = False,
) -> Trajectory:
    """Episodes of random lengths, the first one whole (or all of them).

    Weights come with an `allowed` mask, ids without one, unless `masked` says otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (episodes, steps or spec.steps)
    lengths_B = torch.randint(1, shape[1] + 1, (episodes,), generator=generator)
    lengths_B[: episodes if whole else 1] = shape[1]
    valid_BT = torch.arange(shape[1]) < lengths_B[:, None]
    allowed_BTA = None
    if isinstance(spec.action, Weights) if masked is None else masked:
        allowed_BTA = torch.rand(*shape, spec.action.count, generator=generator) < 0.7
        allowed_BTA[..., 0] = True
    return Trajectory(
        obs=random_observations(spec, shape, generator),
        action=random_actions(spec, shape, generator, allowed_BTA),
        reward=(3 * torch.rand(shape, generator=generator) - 1.5) / spec.reward_scale,
        terminated=torch.arange(shape[1]) == lengths_B[:, None] - 1,
        target=_blank(random_actions(spec, shape, generator, allowed_BTA), valid_BT),
        valid=valid_BT,
        allowed=allowed_BTA,
        facts={name: 0.9 + 0.2 * torch.rand(*shape, *inner, generator=generator) for name, inner in spec.facts.items()},
    )


def random_observations(spec: Spec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _random_part(spec.obs, shape, generator)


def _random_part(space: Observations, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    match space:
        case Items(count):
            return torch.randint(-1, count, shape, generator=generator)
        case Named(parts):
            return space.pack({name: _random_part(parts[name], shape, generator) for name in space.names})
        case _:
            return torch.randn(*shape, *space.shape, generator=generator)


def random_actions(
    spec: Spec, shape: tuple[int, ...], generator: torch.Generator, allowed: Tensor | None = None
) -> Tensor:
    if isinstance(spec.action, Box):
        low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
        return low + (high - low) * torch.rand(*shape, spec.action.count, generator=generator)
    if isinstance(spec.action, Discrete) and allowed is None:
        return torch.randint(spec.action.count, shape, generator=generator)
    logits = torch.randn(*shape, spec.action.count, generator=generator)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits.argmax(-1) if isinstance(spec.action, Discrete) else logits.softmax(-1)


def _blank(action: Tensor, valid_BT: Tensor) -> Tensor:
    """No target in padding."""
    if action.is_floating_point():
        return action * valid_BT[..., None]
    return action.masked_fill(~valid_BT, NO_ACTION)


def random_batch(spec: Spec, **settings: Any) -> Batch:
    """Return the clock's batch of a `random_trajectory`."""
    return spec.clock.batch(random_trajectory(spec, **settings))


def with_other_feedback(trajectory: Trajectory, *, action: bool = True, reward: bool = True) -> Trajectory:
    """Return episodes with the same observations, and with other actions, other rewards, or both."""
    other = trajectory.action
    if action:  # the ids of random episodes start at 0, and weights seldom repeat from episode to episode
        other = other.roll(1, 0) if other.is_floating_point() else torch.where(other > 0, other - 1, other + 1)
    return replace(trajectory, action=other, reward=trajectory.reward * 0.5 + 0.1 if reward else trajectory.reward)


# ---------------------------------------------------------------- playing a batch step by step


def moments(batch: Batch) -> Iterator[Step]:
    """Yield the inputs of each step, as a policy receives them while acting."""
    for t in range(batch.valid.shape[1]):
        yield Step(
            obs=batch.obs[:, t],
            prev_action=batch.prev_action[:, t],
            prev_reward=batch.prev_reward[:, t],
            first=torch.full((len(batch.valid),), t == 0),
            allowed=None if batch.allowed is None else batch.allowed[:, t],
        )


@torch.no_grad()
def stream(policy: Policy, batch: Batch) -> Tensor:
    """Logits (B, T, A) of a batch that is played step by step."""
    streams, steps = batch.valid.shape
    state, logits = policy.init_state(streams, steps, CPU), []
    for moment in moments(batch):
        logits_BA, state = policy.step(state, moment)
        logits.append(logits_BA)
    return torch.stack(logits, dim=1)


def largest(logits: Tensor) -> float:
    """The largest absolute logit of an action that is not masked."""
    return logits[logits.isfinite()].abs().max().item()


class Watch:
    """A clock in place of the module `time`: its time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def call(capsys: Any, run: Callable[[list[str]], None], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    code: Any = 0
    try:
        run(list(argv))
    except SystemExit as stop:
        code = stop.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err
