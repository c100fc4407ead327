"""Norms of the gates by regime. For markets, whose regimes are labelled with hindsight, see `markets.py`.

‖ρ_t‖ is the norm of the regime gate at a step, over all heads, and ‖g_t‖ the norm of a layer's token gate.

Axes: L layers, B episodes, T time, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from uat.domains import split_seed
from uat.engines.rollout import RolloutRunner
from uat.episode import Trajectory
from uat.evaluation.gates import Floats, gate_norms
from uat.evaluation.intervals import interval
from uat.methods import Policy
from uat.methods.uat import UAT
from uat.nn.utility import UtilityGates
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device, precision

Ints = NDArray[np.int64]

AT_ONCE = 256


def gates_in(policy: Policy) -> UtilityGates | None:
    """The module that turns feedback into gates; None if the policy has none."""
    return policy.utility if isinstance(policy, UAT) else None


def gates_by_regime(
    norm_BT: Floats, regime_BT: Ints, valid_BT: NDArray[np.bool_], names: Sequence[str], *, block: float = 1.0
) -> list[dict[str, Any]]:
    """One row per regime: the mean over episodes of the mean norm at the regime's steps, with a 95 % interval."""
    rows = []
    for r, name in enumerate(names):
        here_BT = (regime_BT == r) & valid_BT
        count_B = here_BT.sum(1)
        mean_B = np.where(count_B, np.where(here_BT, norm_BT, 0).sum(1) / np.maximum(count_B, 1), np.nan)
        rows.append({"regime": name, **_mean(mean_B, block)})
    return rows


@cpu_threads()
def gates_of(
    run: Run, names: Sequence[str], *, episodes: int = 64, device: torch.device | str | None = None
) -> list[dict[str, Any]]:
    """‖ρ_t‖ by the regime in the domain's facts, in the run's first test episodes."""
    norms, regimes, real = [], [], []
    for trajectory, policy in played(run, episodes, device):
        if "regime" not in trajectory.facts:
            raise ValueError(f"{run.path}: {run.config.domain_name} does not record a regime for each step")
        norms.append(gate_norms(policy, policy.spec.clock.batch(trajectory)).rho_BT)
        regimes.append(trajectory.facts["regime"].cpu().numpy())
        real.append(trajectory.valid.cpu().numpy())
    head = {"domain": run.config.domain_name, "method": run.config.method_name, "seed": run.config.seed}
    rows = gates_by_regime(np.concatenate(norms), np.concatenate(regimes), np.concatenate(real), names)
    return [{**head, "quantity": "rho_norm", **row} for row in rows]


# ---------------------------------------------------------------- playing


def played(run: Run, episodes: int | None, device: torch.device | str | None) -> Iterator[tuple[Trajectory, Policy]]:
    """Test episodes of a run, played greedily in batches; `episodes=None` means the number in its config, or all."""
    chosen, domain = pick_device(device), run.config.build_domain()
    policy = load_policy(run.path).to(chosen)
    player = RolloutRunner(policy, domain.simulator("test", chosen), device=chosen, sampled=policy.sampled)
    count = domain.episode_count("test", episodes or run.config.evaluation.episodes)
    at_once = min(AT_ONCE, count)
    with contextlib.closing(player):
        for begin in range(0, count, at_once):
            with precision(run.config.train.precision):
                trajectory = player.play(torch.arange(begin, begin + at_once), split_seed("test", 0))
            yield trajectory.map(lambda x, kept=count - begin: x[:kept]), policy


def _mean(x_B: Floats, block: float) -> dict[str, Any]:
    """Mean over the defined values, its 95 % interval, and their number."""
    n = int((~np.isnan(x_B)).sum())
    if n < 2:
        return {"value": float(np.nanmean(x_B)) if n else np.nan, "low": np.nan, "high": np.nan, "n": n}
    low, high = interval(torch.from_numpy(x_B)[None], block)
    return {"value": float(np.nanmean(x_B)), "low": low, "high": high, "n": n}
