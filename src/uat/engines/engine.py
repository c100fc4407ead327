"""Engines: how a policy acts, plays whole episodes and learns. The base class calls the policy's own methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from uat.acting import rollout
from uat.contracts import Agent, Answers
from uat.engines import kernels
from uat.engines.fused import FusedPolicy, fused_view
from uat.engines.graph import copy_to_host
from uat.episode import Batch, Losses, Noise, Step, Trajectory
from uat.methods.policy import Policy, TransformerPolicy
from uat.nn.attention import Attention
from uat.nn.dropout import Dropout, dropped_by, dropped_by_torch


class Engine(Agent[Any]):
    """The plain engine: run a policy launch by launch, with torch's own operations."""

    name = "plain"

    def __init__(self, policy: Policy, *, refused: str | None = None, refused_pass: str | None = None) -> None:
        self.policy, self.spec = policy, policy.spec
        self.device = next(policy.parameters()).device
        self.refused = refused
        """Why no faster engine acts for the policy; None: none was requested, or this is the fastest."""
        self.refused_pass = refused_pass
        """Why the policy does not learn by a faster pass."""
        on_gpu = self.device.type == "cuda"
        droppers = [module for module in policy.modules() if on_gpu and isinstance(module, Dropout)]
        self._dropout_seeds = {module: torch.zeros((), dtype=torch.long, device=self.device) for module in droppers}
        self._seeds = [*policy.sampling_seeds(), *self._dropout_seeds.values()]

    # ------------------------------------------------------------ acting

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        return self.policy.init_state(streams, capacity, device)

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        return self.policy.step(state, step)

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.policy.decide(state, step, gumbel_BA)

    def read(self, batch: Batch) -> Answers:
        return self.policy.read(batch)

    def read_every(self, batch: Batch) -> Answers:
        return self.policy.read_every(batch)

    def rollout(self, worlds: Any, noise: Noise, gumbel_BTA: Tensor | None = None) -> Trajectory:
        """Play one episode in each world, in evaluation mode."""
        self.policy.eval()
        return rollout(self, worlds, noise, gumbel_BTA)

    def rollout_path(self, worlds: Any) -> str:
        """Name the code path by which `rollout` plays these worlds."""
        return self.refused or "plain step"

    # ------------------------------------------------------------ learning

    @property
    def learner(self) -> Policy:
        """The policy whose phases and losses are trained."""
        return self.policy

    @property
    def update_path(self) -> str:
        """Name the code path by which losses are computed."""
        return self.refused_pass or "plain pass"

    def reseed(self, seed: int) -> None:
        """Set the seed of the next update's random numbers: its dropout, and samples drawn by the loss."""
        if (
            self.device.type == "cuda"
        ):  # torch.manual_seed also seeds other kinds of devices, a third of the host's time
            torch.default_generator.manual_seed(seed)
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        for place, buffer in enumerate(self._seeds):
            buffer.fill_(seed + place)

    @contextlib.contextmanager
    def learning(self) -> Iterator[Policy]:
        """Yield the learner in training mode. On a GPU, kernels compute dropout and named random streams inside."""
        learner = self.learner.train()
        if self.device.type != "cuda":
            yield learner
            return
        token = dropped_by.set(self._drop)
        try:
            with kernels.fused_operations():
                yield learner
        finally:
            dropped_by.reset(token)

    def _drop(self, place: Dropout, x: Tensor) -> Tensor:
        if place not in self._dropout_seeds or not kernels.can_drop(x):
            return dropped_by_torch(place, x)
        return kernels.fused_dropout(x, self._dropout_seeds[place], place.share)

    @torch.no_grad()
    def evaluate(self, loss: Callable[[Batch], Losses], trajectory: Trajectory) -> Losses:
        """Return a loss on these episodes in evaluation mode, without gradients and still on the device."""
        with kernels.fused_operations():
            return loss(self.policy.eval().spec.clock.batch(trajectory))

    # ------------------------------------------------------------ the host

    @property
    def runs_ahead(self) -> bool:
        """Whether the host may launch more work before it reads the numbers of earlier work."""
        return self.device.type == "cuda"

    def copy_to_host(self, rows: list[dict[str, Any]]) -> Callable[[], list[dict[str, Any]]]:
        """Start copying the tensors in rows to the host. The returned function waits for these copies only, not for
        later work of the device, and returns the rows."""
        return copy_to_host(rows)

    @property
    def leaves_generator_alone(self) -> bool:
        """Whether an update never uses torch's generator on the device, so that other policies can train there at the
        same time."""
        like = next(self.policy.parameters())
        return not any(_draws(module, like) for module in self.policy.modules())


def _draws(module: nn.Module, like: Tensor) -> bool:
    """Whether a module uses torch's generator in training."""
    match module:
        case nn.Dropout():
            return module.p > 0
        case Attention():
            return module.dropout > 0
        case Dropout():
            return module.share > 0 and not kernels.can_drop(like)
        case _:
            return False


class FusedEngine(Engine):
    """The engine of Triton kernels: fuse each step, whole episodes of supported worlds, and the training pass unless
    `refused_pass` is set."""

    name = "fused step"

    def __init__(
        self, policy: TransformerPolicy, *, refused_pass: str | None = None, concurrent_policies: int = 1
    ) -> None:
        super().__init__(policy, refused_pass=refused_pass)
        self.view = fused_view(policy, fused_pass=refused_pass is None, concurrent_policies=concurrent_policies)
        self._seeds.insert(len(policy.sampling_seeds()), self.view.execution.dropout_seed)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        return self.view.init_state(streams, capacity, device)

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        return self.view.step(state, step)

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.view.decide(state, step, gumbel_BA)

    @torch.no_grad()
    def rollout(self, worlds: Any, noise: Noise, gumbel_BTA: Tensor | None = None) -> Trajectory:
        if not self.view.supports_fused_rollout(worlds):
            return super().rollout(worlds, noise, gumbel_BTA)
        self.policy.eval()
        return self.view.fused_rollout(worlds, noise, gumbel_BTA)

    def rollout_path(self, worlds: Any) -> str:
        return "fused rollout" if self.view.supports_fused_rollout(worlds) else self.name

    @property
    def learner(self) -> FusedPolicy:
        return self.view

    @property
    def update_path(self) -> str:
        return self.refused_pass or "fused pass"

    @property
    def leaves_generator_alone(self) -> bool:
        return self.view.execution.fused_pass or super().leaves_generator_alone
