"""Pace of a training: environment steps per second, and where the time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from torch import Tensor

from uat.contracts import Worlds


class Pace:
    """Wall time of rollouts and updates since the last report. Worlds on the host count their own seconds."""

    def __init__(self, worlds: Worlds, *, ahead: bool = False) -> None:
        """ahead: the host launches work before earlier work is done, so that shares of its time mean nothing."""
        self.worlds, self.ahead = worlds, ahead
        self._restart()

    def _restart(self) -> None:
        self.steps, self.played, self.learnt, self.world_before = 0.0, 0.0, 0.0, self.worlds.seconds

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Count the time of a rollout."""
        begun = time.perf_counter()
        yield
        self.played += time.perf_counter() - begun

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Count the time of updates."""
        begun = time.perf_counter()
        yield
        self.learnt += time.perf_counter() - begun

    def add(self, numbers: Mapping[str, Tensor]) -> None:
        """Count the steps of an epoch."""
        self.steps += float(numbers.get("steps", 0.0))

    def report(self) -> str:
        """Return the pace since the last report, such as "5,120 steps/s (worlds 12 %, policy 30 %, updates 58 %)";
        empty if no steps were counted."""
        total, world = self.played + self.learnt, self.worlds.seconds - self.world_before
        if not self.steps or not total:
            return ""
        shares = {"worlds": world, "policy": self.played - world, "updates": self.learnt}
        if not world:
            shares = {"rollouts": self.played, "updates": self.learnt}
        text = ", ".join(f"{name} {seconds / total:.0%}".replace("%", " %") for name, seconds in shares.items())
        pace = f"{self.steps / total:,.0f} steps/s"
        pace += "" if self.ahead else f" ({text})"
        self._restart()
        return pace
