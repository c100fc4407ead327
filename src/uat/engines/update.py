"""One optimizer step: loss over real steps, clipped gradient, Adam with one learning rate per group.

Everything, including the learning rates, stays on the device, so that the whole step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from uat.engines import kernels
from uat.engines.engine import Engine
from uat.engines.graph import Captured, SerialReplay, captured_or_none
from uat.episode import Batch, Losses, Trajectory
from uat.methods import Phase
from uat.methods.policy import AddUp


def alone(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def optimize(
    phase: Phase, batch: Batch, optimizer: torch.optim.Optimizer, clip: float, add_up: AddUp = alone
) -> dict[str, Tensor]:
    """Take one optimizer step on the phase's loss; return the loss parts and the gradient's norm before clipping, still
    on the device."""
    parts, norm = descend(phase.loss(batch), optimizer, clip, add_up)
    if phase.after_step is not None:
        with torch.no_grad():
            phase.after_step()
    return {**{f"loss/{name}": part for name, part in parts.items()}, "gradient_norm": norm}


def descend(
    losses: Losses, optimizer: torch.optim.Optimizer, clip: float, add_up: AddUp = alone
) -> tuple[dict[str, Tensor], Tensor]:
    """Take one optimizer step on the sum of the parts of a loss; return the parts and the gradient's norm."""
    counts = add_up([count for _, count in losses.values()])
    parts = {name: total / count.clamp_min(1) for (name, (total, _)), count in zip(losses.items(), counts, strict=True)}
    optimizer.zero_grad(set_to_none=True)
    (torch.stack(list(parts.values())).sum() if len(parts) != 1 else next(iter(parts.values()))).backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    learnt = [p for p in parameters if p.grad is not None]
    for p, gradient in zip(learnt, add_up([p.grad for p in learnt if p.grad is not None]), strict=True):
        p.grad = gradient
    if kernels.can_descend(optimizer):
        norm = kernels.fused_adam(optimizer, clip)
    else:
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return dict(zip(parts, add_up([part.detach() for part in parts.values()]), strict=True)), norm


class UpdateRunner:
    """Optimizer steps of one phase of an engine's learner: launch by launch, or on CUDA as one captured graph."""

    def __init__(
        self,
        engine: Engine,
        phase: Phase,
        optimizer: torch.optim.Optimizer,
        clip: float,
        *,
        preserve: Callable[[], Iterable[Tensor]] = tuple,
        add_up: AddUp = alone,
        serial: SerialReplay | None = None,
    ) -> None:
        self.engine, self.phase, self.optimizer, self.clip = engine, phase, optimizer, clip
        self.preserve, self.add_up = preserve, add_up
        self.serial = serial
        """Set if several policies train on the device at the same time: their updates take turns."""
        self.captured: Captured[dict[str, Tensor]] | None = None
        self.capturable = add_up is alone
        """False after a failed capture, and with several processes, whose messages cannot be captured."""
        self.start_B: Tensor | None = None

    def plain(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Take one step, launch by launch."""
        with self.engine.learning() as learner:
            batch = learner.spec.clock.batch(trajectory)
            batch.start = self.start_B
            return optimize(self.phase, batch, self.optimizer, self.clip, self.add_up)

    def start_at(self, start_B: Tensor) -> None:
        """Set the position of each episode's first step (default 0), always in the same tensor."""
        self.start_B = start_B if self.start_B is None else self.start_B.copy_(start_B)

    def update(self, trajectory: Trajectory, seed: int, *, capture: bool = False) -> dict[str, Tensor]:
        """Take one optimizer step on these episodes; return losses and the gradient's norm, still on the device.

        seed: of dropout and sampling.
        capture: whether the episodes are in the same tensors each time, so that the step can be captured.
        """
        if capture and self.capturable and self.captured is None:
            self.captured = captured_or_none(lambda: self.plain(trajectory), "the update", preserve=self.preserve())
            self.capturable = self.captured is not None
        self.engine.reseed(seed)
        if self.captured is None:
            return self.plain(trajectory)
        numbers = self.captured() if self.serial is None else self.serial(self.captured)
        kept = torch.stack(list(numbers.values()))  # the next update overwrites them
        return dict(zip(numbers, kept.unbind(), strict=True))

    def close(self) -> None:
        """Free the captured graph."""
        if self.captured is not None:
            self.captured.close()
            self.captured = None
