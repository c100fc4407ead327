"""The contract of a method: one row of the table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal, get_type_hints

import torch
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.contracts import Agent, Answers
from uat.distributions import Distribution, distribution
from uat.episode import Batch, Losses, Step, Trajectory, masked_sum
from uat.nn.blocks import Trace, Transformer
from uat.nn.encoders import VectorEncoder, vector_parts
from uat.nn.heads import Head, HeadAnswers
from uat.settings import Scale, check_fields, checked
from uat.spec import Spec


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage of training: what is minimised, on whose episodes. Cloning is one phase; other methods have several."""

    name: str
    loss: Callable[[Batch], Losses]
    behaviour: Behaviour | None = None
    """Who plays the episodes: the policy itself as it is by now, or whoever fills a log."""
    share: Scale = 1.0
    """How many epochs, as a share of `train.epochs`."""
    after_step: Callable[[], None] | None = None
    """What follows each optimizer step, on the device, as part of it: such as an average of weights."""
    judged_by: Literal["play", "loss", "nothing"] = "play"
    """What decides which weights are best and when to stop: the domain's metric in greedy play, this phase's loss on
    validation episodes of the same source, or nothing: the last weights are kept."""

    def __post_init__(self) -> None:
        check_fields(self, f"phase {self.name!r}: ")

    def epochs(self, most: int) -> int:
        """Epochs of this phase, if a whole one has so many."""
        return max(1, round(self.share * most))


class Policy(nn.Module, Agent[Any]):
    """Maps what is known at t to logits over actions: all steps at once for training, one at a time for acting."""

    sees: frozenset[str] = frozenset()
    """Feedback that may change a decision: any of "action", "reward"."""
    trains_as: ClassVar[str | None] = None
    """The method whose trained weights this one starts from, if it has no training of its own; see `learner`."""
    sampled: ClassVar[bool] = False
    """Policies are judged by their arg-max."""
    tokens_per_step: int = 1
    """Tokens that each step adds to the sequence that attention goes over."""
    revision: ClassVar[int] = 1
    """Raised when the same config starts to mean another function: old runs are then other runs."""

    head: Head

    def __init__(self, spec: Spec, config: Any) -> None:
        super().__init__()
        checked(spec, Spec, "spec")
        if (kind := config_type(type(self))) is not None:
            checked(config, kind, "config")
        if reason := self.refusal(spec):
            raise ValueError(f"{type(self).__name__} {reason}")
        self.spec, self.config = spec, config

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        """Why a decision problem of this shape is none for the method, with the shape; None: it serves it."""
        return None

    @property
    def learner(self) -> Policy:
        """The policy that plays, learns and is judged in training: this one, or the one that it `trains_as`.

        A learner holds the same parameters under the same names, so that one training serves every method that
        starts from it.
        """
        return self

    @abstractmethod
    def features(self, batch: Batch) -> Tensor:
        """h (B, T, D) at every step, knowing the past alone; what streaming gives, also where it must be replayed."""

    @property
    def endless(self) -> bool:
        """Whether streams may go on without end: memory and time per step stay constant, and `init_state` takes
        ENDLESS as its capacity."""
        return False

    @abstractmethod
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        """Memory for `streams` streams of at most `capacity` steps."""

    @abstractmethod
    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        """Logits (B, A) of this step, and the state after it; the state that came in is consumed."""

    def sampling_seeds(self) -> list[Tensor]:
        """Return the buffers that decide what the loss draws; they are filled anew before each update."""
        return []

    def distribution(self, numbers: Tensor, allowed: Tensor | None = None) -> Distribution:
        """What the numbers that `step` and `logits` give mean: a distribution over actions."""
        return distribution(self.spec, numbers, allowed)

    @property
    def observation_encoder(self) -> nn.Module | None:
        """What raw observations enter, in passes and in steps; None: there is no such place."""
        return None

    def standardise(self, *trajectories: Trajectory) -> None:
        """Fit mean and deviation of every number that is observed, once and before training. From then on raw
        observations are standardised wherever they enter, and the statistics are saved with the weights."""
        encoder = self.observation_encoder
        rows: dict[VectorEncoder, list[Tensor]] = {}
        for trajectory in trajectories:
            for part, value in vector_parts(encoder or nn.Identity(), self.spec.obs, trajectory.obs):
                rows.setdefault(part, []).append(value[trajectory.valid].flatten(1))
        if not rows:
            raise ValueError(f"{type(self).__name__} has no numbers to standardise in observations {self.spec.obs}")
        if any(part.normalizer is not None for part in rows):
            raise ValueError("observations are standardised already: statistics are fitted once")
        for part, values in rows.items():
            part.add_normalizer().fit(torch.cat(values).to(part.linear.weight.device))

    def expect(self, weights: Iterable[str]) -> None:
        """Add those parts that were added to the policy which had weights of these names."""
        for name in weights:
            path, _, last = str(name).rpartition(".normalizer.")
            part = dict(self.named_modules()).get(path)
            if last == "mean" and isinstance(part, VectorEncoder) and part.normalizer is None:
                part.add_normalizer()

    def final(self, batch: Batch) -> Tensor:
        """h (B, D) at the last real step of each episode, for whoever is asked there alone."""
        return self.features(batch)[torch.arange(len(batch.valid), device=batch.valid.device), batch.last_B]

    def logits(self, batch: Batch) -> Tensor:
        """Logits (B, T, A) at every step; for small action sets."""
        return self.head.logits(self.features(batch), batch.allowed)

    def read(self, batch: Batch) -> Answers:
        """What it answers at the last step of each episode: as streaming would, without the steps where it can."""
        row_B, last_B = torch.arange(len(batch.valid), device=batch.valid.device), batch.last_B
        allowed_BA = None if batch.allowed is None else batch.allowed[row_B, last_B]
        return HeadAnswers(self.head, self.final(batch), allowed_BA)

    def loss(self, batch: Batch) -> Losses:
        """How far from the expert, over real steps."""
        return {
            "imitation": masked_sum(
                self.head.nll(self.features(batch), batch.required_target, batch.allowed), batch.valid
            )
        }

    def trace(self, batch: Batch) -> Trace:
        """Attention and gates at every step, for looking at; methods without attention have none to show."""
        raise ValueError(f"{type(self).__name__} has no attention to look at")

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("imitation", self.loss),)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Learnt parameters by learning rate: "base" at `train.lr`, "utility" at `train.utility_lr` where a method has
        a faster part, and any other NAME at the method's own setting NAME_lr.

        What no gradient moves (`requires_grad` False, such as averages of weights) is in none, and in checkpoints.
        """
        return {"base": [p for p in self.parameters() if p.requires_grad]}


def config_type(kind: type[Policy]) -> type | None:
    """The class of settings that a policy declares (`config: UATConfig`); None: it declares none."""
    try:
        hint = get_type_hints(kind).get("config")
    except Exception:  # names that only a type checker can see
        return None
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


class TransformerPolicy(Policy):
    """A policy on the shared backbone."""

    backbone: Transformer

    @property
    def endless(self) -> bool:
        return self.backbone.endless

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder
