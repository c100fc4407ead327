"""Simulators that have kernels: their fused twins, which give the same worlds in fewer launches."""

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
    """Worlds that are played inside a policy's kernel: four Triton functions, and what these read and write.

    start(stream, live, world, T) gives where each world is at first, a number of 32 bits for each row.
    look(t, spot, stream, live, o, world, T, FETCH) gives what the streams observe at step t, a row each, and all that
    the other two need to know of it (one thing or a tuple). note(t, seen, known, stream, live, o, world, T, PUT) writes
    down what belongs to that step. move(t, known, stream, live, action, world, T) gives their rewards and where the
    worlds are then, as `start` does, and writes these down. FETCH(ptr, mask) and PUT(ptr, x, mask) read and write
    numbers of 32 bits without a wait for others; plain loads and stores do, too, in time.

    A stream may have several rows, which are alike: they write the same. What was written is not read again.
    """

    start: Any
    look: Any
    note: Any
    move: Any
    world: tuple[Tensor | int, ...]
    trajectory: Callable[[Tensor], Trajectory]
    """The episodes, once they are played with these actions (B, T)."""


class FusedRollouts(ABC):
    """A simulator whose episodes a policy of the same spec can play in one launch.

    All actions are allowed there, and policies are told what happened.
    """

    spec: Spec

    @abstractmethod
    def fused_world(self, noise: Noise) -> FusedWorld:
        """Return the worlds of `reset(noise)` as a kernel plays them; the kernel reads the noise itself."""


def fused_simulator(worlds: Simulator[Any] | Recording, device: torch.device) -> Any:
    """Return the fused twin of a simulator on this device, or the simulator itself where it has none.

    A subclass may have rules of its own, so exactly the known classes are replaced.
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
