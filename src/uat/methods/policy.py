"""Contract of a method: the base class of policies, and the phases of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from uat.settings import Epochs, Scale, check_fields, checked
from uat.spec import Spec

AddUp = Callable[[list[Tensor]], list[Tensor]]
"""Sum tensors over the processes that share a training."""


class Reuse(ABC):
    """Uses the episodes of one rollout for several updates, as PPO does."""

    @abstractmethod
    def prepare(self, episodes: Trajectory, add_up: AddUp, share_done: float) -> Any:
        """Return the episodes with everything that the updates on them hold constant, computed under the current
        weights; None: learn nothing from these episodes.

        add_up: sums tensors over the processes that share a training; share_done: the finished share of the training.
        """

    @abstractmethod
    def minibatches(self, seed: int, episodes: int) -> Iterator[Tensor]:
        """Yield, for each update, the places of its episodes in the batch of this many episodes."""

    @abstractmethod
    def loss(self, prepared: Any, row_R: Tensor) -> tuple[Losses, Losses]:
        """Return the loss of some of the episodes, weighted as it is minimised, and measures of it for the log."""

    @abstractmethod
    def stops(self, measured: Mapping[str, float]) -> bool:
        """Whether to skip an update with these measures, and the remaining ones on these episodes."""

    @abstractmethod
    def finish(self, episodes: Trajectory, add_up: AddUp) -> dict[str, Tensor]:
        """Update statistics after the last update, and return numbers of the episodes for the log."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage of training: a loss and the source of its episodes. Cloning is one phase; some methods have several."""

    name: str
    loss: Callable[[Batch], Losses]
    behaviour: Behaviour | None = None
    """Source of the episodes: a behaviour that fills a log; None: the current policy plays."""
    share: Scale = 1.0
    """Number of epochs, as a share of `train.epochs`."""
    after_step: Callable[[], None] | None = None
    """Called after each optimizer step, on the device and as part of it, for example to average weights."""
    judged_by: Literal["play", "loss", "nothing"] = "play"
    """Criterion of the best weights and of early stopping: the domain's metric in greedy play, this phase's loss on
    validation episodes of the same source, or nothing, which keeps the last weights."""
    length: Epochs | None = None
    """Number of epochs; None: `share` decides."""
    selects: Callable[[Batch], Losses] | None = None
    """Loss on validation episodes that selects the best weights if `judged_by` is "loss"; None: `loss`."""
    reuse: Reuse | None = None
    """Several updates on the episodes of each rollout; None: one update on `loss`."""

    def __post_init__(self) -> None:
        check_fields(self, f"phase {self.name!r}: ")

    def epochs(self, most: int) -> int:
        """Return the epochs of this phase, given those of a phase with a share of 1."""
        return max(1, round(self.share * most)) if self.length is None else self.length


class Policy(nn.Module, Agent[Any]):
    """Maps the information at step t to logits over actions: all steps at once in training, one at a time in acting."""

    sees: frozenset[str] = frozenset()
    """Feedback that may change a decision: any of "action", "reward"."""
    trains_as: ClassVar[str | None] = None
    """The method whose trained weights this one starts from, if it has no training of its own; see `learner`."""
    sampled: ClassVar[bool] = False
    """False: policies are evaluated by their most likely action."""
    tokens_per_step: int = 1
    """Tokens that each step adds to the sequence for attention."""
    revision: ClassVar[int] = 1
    """Raised when the same config starts to mean another function, which distinguishes new runs from old ones."""

    head: Head

    def __init__(self, spec: Spec, config: Any) -> None:
        super().__init__()
        checked(spec, Spec, "spec")
        if (kind := config_type(type(self))) is not None:
            checked(config, kind, "config")
        if reason := self.unsupported_reason(spec):
            raise ValueError(f"{type(self).__name__} {reason}")
        self.spec, self.config = spec, config

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        """Return why the method does not support a problem of this shape, naming the shape; None: it supports it."""
        return None

    @property
    def learner(self) -> Policy:
        """Policy that plays, learns and is evaluated in training: this one, or the one that it `trains_as`.

        A learner has the same parameters under the same names, so that one training serves every method that starts
        from its weights.
        """
        return self

    @abstractmethod
    def features(self, batch: Batch) -> Tensor:
        """Return h (B, T, D) at every step, computed from the past alone, as in acting step by step."""

    @property
    def endless(self) -> bool:
        """Whether streams may be endless: memory and time per step are constant, and `init_state` accepts the capacity
        ENDLESS."""
        return False

    @abstractmethod
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        """Return the memory for `streams` streams of at most `capacity` steps."""

    @abstractmethod
    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        """Return the logits (B, A) of this step, and the state after it. The given state must not be used again."""

    def sampling_seeds(self) -> list[Tensor]:
        """Return the buffers that seed the random numbers of the loss; the trainer refills them before each update."""
        return []

    def distribution(self, numbers: Tensor, allowed: Tensor | None = None) -> Distribution:
        """Return the distribution over actions whose parameters are the outputs of `step` or `logits`."""
        return distribution(self.spec, numbers, allowed)

    @property
    def observation_encoder(self) -> nn.Module | None:
        """Module that raw observations enter, in passes and in steps; None: the policy has no such module."""
        return None

    @property
    def observation_encoders(self) -> list[nn.Module]:
        """All modules that raw observations enter, such as one for present and one for previous observations."""
        return [] if self.observation_encoder is None else [self.observation_encoder]

    def standardise(self, *trajectories: Trajectory) -> None:
        """Fit the mean and deviation of every observed number, once and before training.

        Afterwards the encoder standardises raw observations, and the statistics are saved with the weights.
        """
        rows: dict[VectorEncoder, list[Tensor]] = {}
        for trajectory in trajectories:
            for encoder in self.observation_encoders:
                for part, value in vector_parts(encoder, self.spec.obs, trajectory.obs):
                    rows.setdefault(part, []).append(value[trajectory.valid].flatten(1))
        if not rows:
            raise ValueError(f"{type(self).__name__} has no numbers to standardise in observations {self.spec.obs}")
        if any(part.normalizer is not None for part in rows):
            raise ValueError("observations are standardised already: statistics are fitted only once")
        for part, values in rows.items():
            part.add_normalizer().fit(torch.cat(values).to(part.linear.weight.device))

    def expect(self, weights: Iterable[str]) -> None:
        """Add the optional parts (normalizers) that weights of these names need, before the weights are loaded."""
        for name in weights:
            path, _, last = str(name).rpartition(".normalizer.")
            part = dict(self.named_modules()).get(path)
            if last == "mean" and isinstance(part, VectorEncoder) and part.normalizer is None:
                part.add_normalizer()

    def final(self, batch: Batch) -> Tensor:
        """Return h (B, D) at the last real step of each episode, where recordings ask for the only decision."""
        return self.features(batch)[torch.arange(len(batch.valid), device=batch.valid.device), batch.last_B]

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits (B, T, A) of every step; for small action sets."""
        return self.head.logits(self.features(batch), batch.allowed)

    def read(self, batch: Batch) -> Answers:
        """Return the answers at the last step of each episode, equal to those of streaming but without its steps."""
        row_B, last_B = torch.arange(len(batch.valid), device=batch.valid.device), batch.last_B
        allowed_BA = None if batch.allowed is None else batch.allowed[row_B, last_B]
        return HeadAnswers(self.head, self.final(batch), allowed_BA)

    def read_every(self, batch: Batch) -> Answers:
        """Return the answers at every step, equal to those of streaming but without its steps."""
        allowed = None if batch.allowed is None else batch.allowed.flatten(0, 1)
        return HeadAnswers(self.head, self.features(batch).flatten(0, 1), allowed)

    def loss(self, batch: Batch) -> Losses:
        """Return the imitation loss: the negative log-likelihood of the expert's actions over real steps."""
        return {
            "imitation": masked_sum(
                self.head.nll(self.features(batch), batch.required_target, batch.allowed), batch.valid
            )
        }

    def trace(self, batch: Batch) -> Trace:
        """Return attention and gates at every step, for inspection. Methods without attention raise ValueError."""
        raise ValueError(f"{type(self).__name__} has no attention to look at")

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("imitation", self.loss),)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the trained parameters by learning rate: "base" at `train.lr`, "utility" at `train.utility_lr` for a
        part with its own rate, and any other group at its rate in `learning_rates`.

        Parameters without a gradient (such as averages of weights) are in no group, but in checkpoints.
        """
        return {"base": [p for p in self.parameters() if p.requires_grad]}

    def learning_rates(self) -> dict[str, float]:
        """Return the peak learning rates of parameter groups other than "base" and "utility"; none by default."""
        return {}


def config_type(kind: type[Policy]) -> type | None:
    """Return the class of settings that a policy declares (`config: UATConfig`), or None."""
    try:
        hint = get_type_hints(kind).get("config")
    except Exception:  # annotations may use names that only a type checker sees
        return None
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def factor_of_returns(spec: Spec, return_scale: float | None) -> float:
    """Return the factor by which a policy multiplies the return so far; unset: 1 / horizon, which makes the return of a
    long episode as large as a reward."""
    if return_scale is not None:
        return return_scale
    if spec.horizon is None:
        raise ValueError(
            "return_scale is unset, which means one over the horizon, but the problem has no horizon: set it"
        )
    return 1 / spec.horizon


class TransformerPolicy(Policy):
    """A policy with the shared backbone."""

    backbone: Transformer

    @property
    def endless(self) -> bool:
        return self.backbone.endless

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder
