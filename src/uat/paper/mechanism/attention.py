"""What policies attend to when the world changes under them (paper, figure "Cyclic-shift attention on DarkRoom").

Trained policies play episodes that are longer than those of training and whose goal shifts inside; nothing is trained
again. Their position tables must reach so far: train with `method.max_positions` 151 and `train.random_start`.

Logits count only in comparison to the other keys of the same query: a number added to all of them changes nothing.
Maps of logits are therefore centred: less the mean over the keys that the query sees.

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
"""One episode of 150 steps with two shifts, 32 of them."""
QUANTITIES: dict[str, int | None] = {"post_shift_mass": None, "early_post_shift_mass": 15}
"""What is measured of the maps: by all steps after a shift, and by the first of them."""
Floats = NDArray[np.float64]


# ---------------------------------------------------------------- one policy, one batch


@torch.no_grad()
def attention_maps(policy: Policy, batch: Batch) -> Tensor:
    """What every step attends to, in all layers and heads: (L, B, H, T, T), from query to key; rows sum to one.

    Where a step is several tokens (DT), the query is the one that the action is read off, and attention to a step is
    that to all its tokens.
    """
    alpha = policy.eval().trace(batch).attention_LBHTT
    per_step, steps = getattr(policy, "tokens_per_step", 1), batch.valid.shape[1]
    missing = per_step * steps - alpha.shape[-1]  # the first step lacks the action before it
    alpha = torch.nn.functional.pad(alpha, (missing, 0, missing, 0))
    return alpha[..., per_step - 1 :: per_step, :].unflatten(-1, (steps, per_step)).sum(-1)


@torch.no_grad()
def logit_split(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """What observations and what feedback contribute to attention's logits: base and modulation, (L, B, H, T, T).

    Their sum is the logit. Entries right of the diagonal are of keys that the query does not see. Modulation is zero
    where feedback does not enter by gates.
    """
    if not isinstance(policy, TransformerPolicy):
        raise ValueError(f"{type(policy).__name__} is not on the shared backbone: its logits have no such parts")
    return policy.backbone.split_logits(policy.eval().trace(batch))


def centred(logits: Tensor) -> Tensor:
    """(..., T, T) less the mean over the keys that each query sees; NaN where a key is not seen."""
    unseen_TT = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    known = logits.masked_fill(unseen_TT, torch.nan)
    return known - known.nanmean(-1, keepdim=True)


def post_shift_mass(attention_LBHTT: Tensor, shifts: Sequence[int], first: int | None = None) -> Tensor:
    """(K, B) attention that steps after a shift pay to steps after it, themselves included.

    A mean over layers, heads and the steps of the segment that the shift begins, which ends with the next one; or over
    the first so many of them, while most of the past is still of the old goal.
    """
    alpha_BTT, masses = attention_LBHTT.mean((0, 2)), []
    for begin, end in zip(shifts, [*shifts[1:], alpha_BTT.shape[-1]], strict=True):
        until = end if first is None else min(end, begin + first)
        masses.append(alpha_BTT[:, begin:until, begin:until].sum(-1).mean(-1))
    return torch.stack(masses)


def even_mass(steps: int, shifts: Sequence[int], first: int | None = None) -> list[float]:
    """What `post_shift_mass` is for who attends to all of the past alike."""
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
    """A run's policy and the long episodes that it plays greedily; the same worlds for every run of a task."""
    config, chosen = run.config.domain, pick_device(device)
    if "shift_steps" not in {f.name for f in fields(config)}:
        raise ValueError(f"{run.path}: goals do not shift inside the episodes of {run.config.domain_name}")
    domain = DOMAINS[run.config.domain_name].build(replace(config, horizon=steps, shift_steps=tuple(shifts)))
    policy, simulator = load_policy(run.path).to(chosen), domain.simulator("test", chosen)
    return policy, rollout(policy, simulator, simulator.noise(torch.arange(episodes), split_seed("test", 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStudy:
    """Means over seeds, episodes and heads, one map per layer, queries before keys; NaN where a key is not seen."""

    blind_LTT: Floats
    """Attention of the blind policy."""
    told_LTT: Floats
    """Attention of the policy that is told feedback."""
    base_LTT: Floats
    """Its logits as far as observations make them, centred."""
    modulation_LTT: Floats
    """Its logits as far as feedback makes them, centred."""
    modulation_size_LTT: Floats
    """The mean size of the same: heads may pull in opposite directions."""
    difference_LTT: Floats
    """Its logits less those of the blind policy, centred."""
    shifts: tuple[int, ...]
    rows: list[dict[str, Any]]
    """Post-shift mass of each policy and their difference, by shift and over all, with 95 % intervals."""


@cpu_threads()
def attention_under_shifts(
    told: Sequence[Run],
    blind: Sequence[Run],
    *,
    steps: int = STEPS,
    shifts: Sequence[int] = SHIFTS,
    episodes: int = EPISODES,
    device: torch.device | str | None = None,
) -> AttentionStudy:
    """Maps and masses of runs that differ by seed (UAT), beside as many of a blind method (Vanilla).

    Every policy plays the same worlds. Masses of the two are paired by seed and episode.
    """
    if not told or len(told) != len(blind):
        raise ValueError(f"{len(told)} runs that are told feedback need as many blind ones, got {len(blind)}")
    how = {"steps": steps, "shifts": shifts, "episodes": episodes, "device": device}
    maps: dict[str, list[Floats]] = {}
    names = [told[0].config.method_name, blind[0].config.method_name]
    masses = {quantity: {name: list[Tensor]() for name in names} for quantity in QUANTITIES}
    if len(set(names)) < 2:
        raise ValueError(f"both sides are runs of {told[0].config.method_name}: there is nothing to compare")
    for runs in zip(told, blind, strict=True):
        seen = [_look(*shifted_episodes(run, **how)) for run in runs]
        for run, one in zip(runs, seen, strict=True):
            for quantity, first in QUANTITIES.items():
                masses[quantity][run.config.method_name].append(post_shift_mass(one.attention, shifts, first).cpu())
        found = {
            "blind": _causal(seen[1].attention),
            "told": _causal(seen[0].attention),
            "base": centred(seen[0].base),
            "modulation": centred(seen[0].modulation),
            "modulation_size": centred(seen[0].modulation).abs(),
            "difference": centred(seen[0].base + seen[0].modulation) - centred(seen[1].base + seen[1].modulation),
        }
        for name, x_LBHTT in found.items():
            maps.setdefault(name, []).append(x_LBHTT.double().mean((1, 2)).cpu().numpy())
    rows = [
        row
        for quantity, own in masses.items()
        for row in _mass_rows(
            quantity, {name: torch.stack(values, dim=1) for name, values in own.items()}, told[0], steps, tuple(shifts)
        )
    ]
    return AttentionStudy(
        **{f"{name}_LTT": np.mean(values, axis=0) for name, values in maps.items()},
        shifts=tuple(shifts),
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class _Look:
    attention: Tensor
    base: Tensor
    modulation: Tensor


def _look(policy: Policy, trajectory: Trajectory) -> _Look:
    batch = policy.spec.clock.batch(trajectory)
    return _Look(attention_maps(policy, batch), *logit_split(policy, batch))


def _causal(attention: Tensor) -> Tensor:
    """NaN, not zero, where a key is not seen."""
    return attention.masked_fill(torch.ones_like(attention[0, 0, 0], dtype=torch.bool).triu(1), torch.nan)


def _mass_rows(
    quantity: str, mass_KSE: dict[str, Tensor], run: Run, steps: int, shifts: tuple[int, ...]
) -> list[dict[str, Any]]:
    (told, told_KSE), (blind, blind_KSE) = mass_KSE.items()
    series = {told: told_KSE, blind: blind_KSE, f"{told} - {blind}": told_KSE - blind_KSE}
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
