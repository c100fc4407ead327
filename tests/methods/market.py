"""A toy market with a known best portfolio, shared by the tests of SARL and DeepTrader.

Axes: B batch, T time, N assets, F indicators, A cash and assets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from uat.acting import Behaviour
from uat.episode import Batch, Trajectory
from uat.methods import Phase, Policy
from uat.spec import Assets, Spec, Weights

ASSETS, INDICATORS, STEPS = 4, 3, 12
SPEC = Spec(
    obs=Assets(ASSETS, INDICATORS),
    action=Weights(ASSETS + 1),
    horizon=STEPS,
    reward_scale=50.0,
    facts={"relative": (ASSETS + 1,)},
)


def batch_of(obs_BTNF: Tensor, return_BTN: Tensor, allowed_BTA: Tensor | None = None) -> Batch:
    """Return a batch of days with these indicators, each followed by these returns."""
    shape = return_BTN.shape[:2]
    relative_BTA = torch.cat([torch.ones(*shape, 1), 1 + return_BTN], dim=-1)
    trajectory = Trajectory(
        obs=obs_BTNF,
        action=torch.full((*shape, ASSETS + 1), 1 / (ASSETS + 1)),
        reward=torch.zeros(shape),
        terminated=torch.zeros(shape, dtype=torch.bool),
        target=torch.full((*shape, ASSETS + 1), 1 / (ASSETS + 1)),
        valid=torch.ones(shape, dtype=torch.bool),
        allowed=allowed_BTA,
        facts={"relative": relative_BTA},
    )
    return SPEC.clock.batch(trajectory)


def signalled(generator: torch.Generator, episodes: int = 24) -> Batch:
    """An asset's first indicator predicts its move of 2 % by the next close; the others are noise."""
    obs_BTNF = torch.randn(episodes, STEPS, ASSETS, INDICATORS, generator=generator)
    return batch_of(obs_BTNF, 0.02 * obs_BTNF[..., 0].sign())


def fit(
    policy: Policy,
    phase: Phase,
    batches: int,
    draw: Callable[[torch.Generator], Batch] = signalled,
    lr: float = 1e-2,
) -> None:
    """Minimise the phase's loss with Adam, on fresh batches."""
    assert isinstance(phase.behaviour, Behaviour)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    for _ in range(batches):
        losses = phase.loss(draw(generator))
        optimizer.zero_grad()
        torch.stack([total / count for total, count in losses.values()]).sum().backward()
        optimizer.step()
