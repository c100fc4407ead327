"""Fused twins of simulators: Triton kernels that give the same worlds in fewer launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Recording, Simulator
from uat.engines.kernels import compiles
from uat.episode import Noise, Trajectory
from uat.spec import Spec


@dataclass(frozen=True, slots=True)
class FusedWorld:
    """Worlds that are played inside a policy's kernel: four Triton functions, and the tensors that they read and write.

    start(stream, live, world, T) returns the initial state of each world, a 32-bit number per row.
    look(t, spot, stream, live, o, world, T, FETCH) returns the observations at step t, one row per stream, and a value
    or tuple `known` with what note and move need.
    note(t, seen, known, stream, live, o, world, T, PUT) writes the record of that step.
    move(t, known, stream, live, action, world, T) returns the rewards and the next states, as `start` does, and writes
    the rewards. FETCH(ptr, mask) and PUT(ptr, x, mask) read and write 32-bit numbers without waiting for other memory
    accesses; plain loads and stores are correct too.

    A stream may have several identical rows, which write the same values. Written values are never read again.
    """

    start: Any
    look: Any
    note: Any
    move: Any
    world: tuple[Tensor | int, ...]
    trajectory: Callable[[Tensor], Trajectory]
    """Return the trajectories of the episodes played with these actions (B, T)."""


class FusedRollouts(ABC):
    """A simulator whose episodes a policy of the same spec can play in one launch.

    All actions are allowed in these worlds, and policies see the uncorrupted feedback.
    """

    spec: Spec

    @abstractmethod
    def fused_world(self, noise: Noise) -> FusedWorld:
        """Return the worlds of `reset(noise)` as a kernel plays them; the kernel reads the noise itself."""


def fused_simulator(worlds: Simulator[Any] | Recording, device: torch.device) -> Any:
    """Return the fused twin of a simulator on this device, or the simulator itself if it has none.

    Only the exact known classes are replaced, since a subclass may have other rules.
    """
    if not compiles(device):
        return worlds
    from uat.domains.darkroom.world import DarkRoomSimulator
    from uat.domains.sepsis.world import SepsisSimulator
    from uat.feedback import CorruptedSimulator

    if type(worlds) is DarkRoomSimulator:
        from uat.engines.triton.darkroom import FusedDarkRoom

        return FusedDarkRoom(worlds)
    if type(worlds) is SepsisSimulator:
        from uat.engines.triton.sepsis import FusedSepsis

        return FusedSepsis(worlds)
    if type(worlds) is CorruptedSimulator:
        return CorruptedSimulator(fused_simulator(worlds.worlds, device), worlds.config)
    return worlds
