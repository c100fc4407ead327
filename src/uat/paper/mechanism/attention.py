"""Attention of policies when the goal shifts within an episode (paper, figure "Cyclic-shift attention on DarkRoom").

Trained policies, without further training, play episodes that are longer than in training and contain shifts of the
goal. Their position tables must cover these episodes: train with `method.max_positions` 151 and `train.random_start`.

Only differences between the logits of one query matter, since a constant added to all of them changes nothing. Maps of
logits are therefore centred: the mean over the visible keys of each query is subtracted.

Axes: S seeds of training, E episodes, K shifts, L layers, B batch, H heads, T time (query, then key).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uat.acting import rollout
from uat.domains import DOMAINS, split_seed
from uat.episode import Batch, Trajectory
from uat.evaluation.intervals import interval
from uat.methods import Policy
from uat.methods.policy import TransformerPolicy
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

STEPS, SHIFTS, EPISODES = 150, (50, 100), 32
"""Steps of an episode, times of its shifts, and the number of episodes."""
QUANTITIES: dict[str, int | None] = {"post_shift_mass": None, "early_post_shift_mass": 15}
"""Measured quantities: attention of all steps after a shift (None), or of the first steps after it."""
Floats = NDArray[np.float64]


# ---------------------------------------------------------------- one policy, one batch


@torch.no_grad()
def attention_maps(policy: Policy, batch: Batch) -> Tensor:
    """Attention of every step in all layers and heads (L, B, H, T, T), from query to key; rows sum to one.

    If a step is several tokens (DT), the query is the token that predicts the action, and the attention to a step is
    the sum over its tokens.
    """
    alpha = policy.eval().trace(batch).attention_LBHTT
    per_step, steps = policy.tokens_per_step, batch.valid.shape[1]
    missing = per_step * steps - alpha.shape[-1]  # the first step lacks the action before it
    alpha = torch.nn.functional.pad(alpha, (missing, 0, missing, 0))
    return alpha[..., per_step - 1 :: per_step, :].unflatten(-1, (steps, per_step)).sum(-1)


@torch.no_grad()
def logit_split(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Split attention logits into contributions of observations (base) and feedback (modulation), (L, B, H, T, T).

    The logit is the sum of both. Entries right of the diagonal belong to keys that the query does not see. The
    modulation is zero for policies without gates.
    """
    if not isinstance(policy, TransformerPolicy):
        raise ValueError(f"{type(policy).__name__} does not use the shared backbone, so its logits cannot be split")
    return policy.backbone.split_logits(policy.eval().trace(batch))


def centred(logits: Tensor) -> Tensor:
    """Subtract each query's mean over visible keys from logits (..., T, T); NaN for keys that are not visible."""
    unseen_TT = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    known = logits.masked_fill(unseen_TT, torch.nan)
    return known - known.nanmean(-1, keepdim=True)


def post_shift_mass(attention_LBHTT: Tensor, shifts: Sequence[int], first: int | None = None) -> Tensor:
    """Attention (K, B) of the steps after a shift to the steps after that shift, including themselves.

    The mean over layers, heads and the steps of the segment between the shift and the next one; or over its `first`
    steps, when most of the past still belongs to the old goal.
    """
    alpha_BTT, masses = attention_LBHTT.mean((0, 2)), []
    for begin, end in zip(shifts, [*shifts[1:], alpha_BTT.shape[-1]], strict=True):
        until = end if first is None else min(end, begin + first)
        masses.append(alpha_BTT[:, begin:until, begin:until].sum(-1).mean(-1))
    return torch.stack(masses)


def even_mass(steps: int, shifts: Sequence[int], first: int | None = None) -> list[float]:
    """`post_shift_mass` of uniform attention to the whole past."""
    even_TT = torch.ones(steps, steps).tril()
    return post_shift_mass((even_TT / even_TT.sum(-1, keepdim=True))[None, None, None], shifts, first)[:, 0].tolist()


# ---------------------------------------------------------------- trained policies under shifts


@cpu_threads()
def shifted_episodes(
    run: Run,
    *,
    steps: int = STEPS,
    shifts: Sequence[int] = SHIFTS,
    episodes: int = EPISODES,
    device: torch.device | str | None = None,
) -> tuple[Policy, Trajectory]:
    """A run's policy and the long episodes that it plays greedily, in the same worlds for every run of a task."""
    config, chosen = run.config.domain, pick_device(device)
    if "shift_steps" not in {f.name for f in fields(config)}:
        raise ValueError(f"{run.path}: goals do not shift inside the episodes of {run.config.domain_name}")
    domain = DOMAINS[run.config.domain_name].build(replace(config, horizon=steps, shift_steps=tuple(shifts)))
    policy, simulator = load_policy(run.path).to(chosen), domain.simulator("test", chosen)
    return policy, rollout(policy, simulator, simulator.noise(torch.arange(episodes), split_seed("test", 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStudy:
    """Means over seeds, episodes and heads: one map per layer, query by key; NaN for keys that are not visible."""

    blind_LTT: Floats
    """Attention of the blind policy."""
    told_LTT: Floats
    """Attention of the policy that sees feedback."""
    base_LTT: Floats
    """Contribution of observations to the logits of the policy that sees feedback, centred."""
    modulation_LTT: Floats
    """Contribution of feedback to its logits, centred."""
    modulation_size_LTT: Floats
    """Mean absolute value of that contribution, since heads may have opposite signs."""
    difference_LTT: Floats
    """Logits of the policy that sees feedback minus those of the blind policy, centred."""
    shifts: tuple[int, ...]
    rows: list[dict[str, Any]]
    """Post-shift mass of each policy and their difference, by shift and over all shifts, with 95 % intervals."""


@cpu_threads()
def attention_under_shifts(
    informed: Sequence[Run],
    blind: Sequence[Run],
    *,
    steps: int = STEPS,
    shifts: Sequence[int] = SHIFTS,
    episodes: int = EPISODES,
    device: torch.device | str | None = None,
) -> AttentionStudy:
    """Attention maps and masses of runs that differ by seed (UAT) and of equally many runs of a blind method (Vanilla).

    All policies play the same worlds. Masses of the two methods are paired by seed and episode.
    """
    if not informed or len(informed) != len(blind):
        raise ValueError(f"{len(informed)} runs that see feedback need as many blind runs, got {len(blind)}")
    options = {"steps": steps, "shifts": shifts, "episodes": episodes, "device": device}
    maps: dict[str, list[Floats]] = {}
    names = [informed[0].config.method_name, blind[0].config.method_name]
    masses = {quantity: {name: list[Tensor]() for name in names} for quantity in QUANTITIES}
    if len(set(names)) < 2:
        raise ValueError(f"both sides are runs of {informed[0].config.method_name}: there is nothing to compare")
    for runs in zip(informed, blind, strict=True):
        maps_of_runs = [_measure(*shifted_episodes(run, **options)) for run in runs]
        for run, one in zip(runs, maps_of_runs, strict=True):
            for quantity, first in QUANTITIES.items():
                masses[quantity][run.config.method_name].append(post_shift_mass(one.attention, shifts, first).cpu())
        informed_maps, blind_maps = maps_of_runs
        parts = {
            "blind": _causal(blind_maps.attention),
            "told": _causal(informed_maps.attention),
            "base": centred(informed_maps.base),
            "modulation": centred(informed_maps.modulation),
            "modulation_size": centred(informed_maps.modulation).abs(),
            "difference": centred(informed_maps.base + informed_maps.modulation)
            - centred(blind_maps.base + blind_maps.modulation),
        }
        for name, x_LBHTT in parts.items():
            maps.setdefault(name, []).append(x_LBHTT.double().mean((1, 2)).cpu().numpy())
    rows = [
        row
        for quantity, own in masses.items()
        for row in _mass_rows(
            quantity,
            {name: torch.stack(values, dim=1) for name, values in own.items()},
            informed[0],
            steps,
            tuple(shifts),
        )
    ]
    return AttentionStudy(
        **{f"{name}_LTT": np.mean(values, axis=0) for name, values in maps.items()},
        shifts=tuple(shifts),
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class _Maps:
    attention: Tensor
    base: Tensor
    modulation: Tensor


def _measure(policy: Policy, trajectory: Trajectory) -> _Maps:
    batch = policy.spec.clock.batch(trajectory)
    return _Maps(attention_maps(policy, batch), *logit_split(policy, batch))


def _causal(attention: Tensor) -> Tensor:
    """Replace the zeros of invisible keys by NaN."""
    return attention.masked_fill(torch.ones_like(attention[0, 0, 0], dtype=torch.bool).triu(1), torch.nan)


def _mass_rows(
    quantity: str, mass_KSE: dict[str, Tensor], run: Run, steps: int, shifts: tuple[int, ...]
) -> list[dict[str, Any]]:
    (informed, informed_KSE), (blind, blind_KSE) = mass_KSE.items()
    series = {informed: informed_KSE, blind: blind_KSE, f"{informed} - {blind}": informed_KSE - blind_KSE}
    even = even_mass(steps, shifts, QUANTITIES[quantity])
    rows = []
    for method, x_KSE in series.items():
        by_shift = {str(at): (x_KSE[k], even[k]) for k, at in enumerate(shifts)}
        for shift, (x_SE, level) in {**by_shift, "all": (x_KSE.mean(0), float(np.mean(even)))}.items():
            low, high = interval(x_SE)
            rows.append(
                {
                    "domain": run.config.domain_name,
                    "task": run.config.build_domain().task,
                    "method": method,
                    "quantity": quantity,
                    "shift": shift,
                    "value": x_SE.double().mean().item(),
                    "low": low,
                    "high": high,
                    "even": level,
                    "seeds": x_SE.shape[0],
                    "n": x_SE.shape[1],
                }
            )
    return rows
