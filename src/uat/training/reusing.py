"""Several updates on the episodes of one rollout, for phases whose objective reuses them (`Phase.reuse`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uat.engines import Engine
from uat.engines.update import descend
from uat.episode import Trajectory
from uat.methods.policy import AddUp, Reuse


class ReusingUpdates:
    """Take the updates of a phase that reuses each rollout: launch by launch, until its objective stops."""

    def __init__(
        self, engine: Engine, reuse: Reuse, optimizer: torch.optim.Optimizer, clip: float, add_up: AddUp
    ) -> None:
        self.engine, self.reuse, self.optimizer, self.clip, self.add_up = engine, reuse, optimizer, clip, add_up

    def update(
        self, trajectory: Trajectory, seed: int, *, place: int, episodes: int, share_done: float
    ) -> dict[str, Tensor]:
        """Learn from these episodes; return the mean loss and measures of all updates, and numbers of the episodes.

        place, episodes: these are the episodes from that place on, of a batch of so many that all processes share.
        """
        self.engine.reseed(seed)
        rows: list[dict[str, Tensor]] = []
        with self.engine.learning():
            prepared = self.reuse.prepare(trajectory, self.add_up, share_done)
            for place_R in self.reuse.minibatches(seed, episodes) if prepared is not None else ():
                own_R = place_R[(place_R >= place) & (place_R < place + len(trajectory.valid))] - place
                numbers = self._update(prepared, own_R.to(trajectory.valid.device))
                if numbers is None:
                    break
                rows.append(numbers)
        means = {name: torch.stack([row[name] for row in rows]).mean() for name in rows[0]} if rows else {}
        return {**means, "updates": torch.tensor(float(len(rows))), **self.reuse.finish(trajectory, self.add_up)}

    def _update(self, prepared: Any, row_R: Tensor) -> dict[str, Tensor] | None:
        """Take one optimizer step; None: the objective stops before it."""
        losses, measures = self.reuse.loss(prepared, row_R)
        flat = self.add_up([x.detach().double() for pair in measures.values() for x in pair])
        measured = {name: flat[2 * i] / flat[2 * i + 1].clamp_min(1) for i, name in enumerate(measures)}
        if self.reuse.stops({name: float(x) for name, x in measured.items()}):
            return None
        parts, norm = descend(losses, self.optimizer, self.clip, self.add_up)
        return {**{f"loss/{name}": part for name, part in parts.items()}, "gradient_norm": norm, **measured}
