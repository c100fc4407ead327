"""The contract of a method: one row of the table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal, get_type_hints

import torch
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.contracts import Agent, Answers
from uat.distributions import Distribution, distribution
from uat.engines import kernels
from uat.episode import Batch, Losses, Noise, Step, Trajectory, masked_sum
from uat.nn import structure
from uat.nn.blocks import Trace, Transformer
from uat.nn.cache import KVCache
from uat.nn.encoders import VectorEncoder, vector_parts
from uat.nn.heads import Head, HeadAnswers
from uat.nn.utility import UtilityGates
from uat.settings import Scale, check_fields, checked
from uat.spec import Box, Named, Spec


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

    def share_device(self, policies: int) -> None:
        """So many policies, this one among them, will act on the device at a time."""

    def fuse(self) -> str | None:
        """Let `step` take the fused path from now on; if there is none for this policy and device, why."""
        return f"{type(self).__name__} has no fused step"

    def fuse_pass(self) -> str | None:
        """Let training take the fused pass from now on; if there is none for this policy and device, why."""
        return f"{type(self).__name__} has no fused pass"

    def dropout_seeds(self) -> list[Tensor]:
        """Where the seeds lie that decide what a training pass drops."""
        return [buffer for name, buffer in self.named_buffers() if name.endswith("dropout_seed")]

    def reseed(self, seed: int, places: Sequence[Tensor] | None = None) -> None:
        """Decide what the next training pass drops.

        places: what `dropout_seeds` gave; looking for them in all modules takes a host longer than all the rest.
        """
        device = next(self.parameters()).device
        if device.type == "cuda":  # torch.manual_seed asks all kinds of devices: a third of a host's time for an epoch
            torch.default_generator.manual_seed(seed)
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        for place, buffer in enumerate(self.dropout_seeds() if places is None else places):
            buffer.fill_(seed + place)

    @property
    def own_noise(self) -> bool:
        """Whether training leaves torch's generator on the device alone, so that others may train beside it."""
        return getattr(self.config, "dropout", 0.0) == 0

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
    """A policy on the shared backbone: on CUDA it may take the fused step and the fused pass.

    Its modules may be changed at any time, so their structure is compared with that of a new policy whenever a fast
    path is chosen or entered: in `fuse`, `fuse_pass`, `plays`, `open_cache`, `takes_pass`, and where a session opens.
    A policy that was changed after `fuse` takes the plain step in memories that are opened from then on; one that was
    changed after `fuse_pass` leaves the fused pass. A memory that is open already is not checked again.
    """

    fusible: ClassVar[bool] = False
    """Whether fast engines compute exactly what this class does. Each class says it of itself, and no subclass inherits
    it: it may compute anything."""
    backbone: Transformer
    tokens_per_step: int = 1

    @property
    def endless(self) -> bool:
        return self.backbone.endless

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder

    @property
    def gates(self) -> UtilityGates | None:
        """What turns feedback into gates, where the method has it."""
        return None

    @property
    def fused(self) -> bool:
        """Whether `step` takes the fused path; see `fuse`. A memory serves the path on which it was opened."""
        return self.backbone.fused

    @fused.setter
    def fused(self, value: bool) -> None:
        self.backbone.fused = value

    @property
    def fused_pass(self) -> bool:
        """Whether `features` takes the fused path in training; see `fuse_pass`."""
        return self.backbone.fused_pass

    @fused_pass.setter
    def fused_pass(self, value: bool) -> None:
        self.backbone.fused_pass = value

    @property
    def own_noise(self) -> bool:
        return self.fused_pass or super().own_noise

    def plain_alone(self) -> str | None:
        """Why this problem is none for fast engines, which know plain observations and actions; None: it may be."""
        if isinstance(self.spec.obs, Named):
            return "dictionary observations are encoded by the plain engine alone"
        return "actions of a box are decided by the plain engine alone" if isinstance(self.spec.action, Box) else None

    def structure_difference(self) -> str | None:
        """What fast engines, which read weights and call no modules, would not see in this policy; None: nothing."""
        if not vars(type(self)).get("fusible", False):
            return f"{type(self).__name__} is a class of its own, and may compute anything"
        return structure.difference(self, self.spec, self.config)

    def open_cache(self, streams: int, capacity: int) -> KVCache:
        """Keys and values of so many steps in every stream; with the current weights as the fused step reads them, if
        `step` takes it."""
        return self.backbone.init_cache(
            streams,
            capacity,
            utility=self.gates,
            may_fuse=self.fused and self.structure_difference() is None,
        )

    def takes_pass(self) -> bool:
        """Whether this pass over episodes takes the fused path. A policy leaves it for good (see `fuse_pass`) if it was
        changed, or if some of the backbone trains and some does not: the kernels drop everywhere or nowhere."""
        if self.fused_pass and self.training:
            alike = all(module.training for module in self.backbone.modules())
            self.fused_pass = alike and self.structure_difference() is None
        return self.fused_pass and self.training

    def attend(self, x_BTD: Tensor, start_B: Tensor | None = None) -> Tensor:
        """Tokens of whole episodes through all blocks: h (B, T, D)."""
        self.takes_pass()
        return self.backbone.attend(x_BTD, start_B=start_B)

    def share_device(self, policies: int) -> None:
        self.backbone.beside = policies

    def plays(self, simulator: Any) -> bool:
        """Where the step is fused, the worlds offer to be played inside, and both are of one shape. A class with a step
        of its own is not played by the kernel of another."""
        from uat.engines.worlds import FusedRollouts

        if not self.fused or not isinstance(simulator, FusedRollouts) or simulator.spec != self.spec:
            return False
        owners = {_owner(type(self), name) for name in ("play", "step", "decide", "init_state")}
        fits = len(owners) == 1 and kernels.plays(self.backbone, self.head, self.spec)
        return fits and self.structure_difference() is None

    def _play(self, simulator: Any, noise: Noise, gumbel_BTA: Tensor | None) -> Trajectory:
        streams, world = len(next(iter(noise.values()))), simulator.fused_world(noise)
        action_BT = kernels.fused_play(self.backbone, self.gates, self.head, self.spec, streams, world, gumbel_BTA)
        return world.trajectory(action_BT)

    def loss(self, batch: Batch) -> Losses:
        if not (self.fused_pass and self.training and batch.allowed is None):
            return super().loss(batch)
        target, h_BTD = batch.required_target, self.features(batch)
        fused = kernels.fused_nll(self.head, h_BTD, target, batch.valid) if self.fused_pass else None
        return {"imitation": fused or masked_sum(self.head.nll(h_BTD, target), batch.valid)}

    def fuse(self) -> str | None:
        difference = self.plain_alone() or self.structure_difference()
        reason = f"no fused step: {difference}" if difference else kernels.unfit(self.backbone, self.gates)
        self.fused = reason is None
        return reason

    def fuse_pass(self) -> str | None:
        difference, steps = (
            self.plain_alone() or self.structure_difference(),
            self.tokens_per_step * (self.spec.horizon or 0),
        )
        reason = f"no fused pass: {difference}" if difference else kernels.unfit_pass(self.backbone, self.gates, steps)
        self.fused_pass = reason is None
        return reason


def _owner(kind: type, name: str) -> type:
    """The class that a method comes from."""
    return next(base for base in kind.__mro__ if name in vars(base))
