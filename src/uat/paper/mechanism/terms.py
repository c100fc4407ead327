"""Sizes of the terms of attention logits in trained policies (paper, appendix "Empirical Logit Decomposition").

  ℓ0   x_t' W_Q' W_K x_j                              observations alone
  ℓ1   x_t' W_Q' (g_j ⊙ W_K^u x_j)                    the key's feedback re-ranks it
  ℓ2   (ρ_t ⊙ W_Q^u x_t)' W_K x_j                     the regime reshapes the query
  ℓ3   (ρ_t ⊙ W_Q^u x_t)' (g_j ⊙ W_K^u x_j)           both gates at once
  offsets                                             the five terms that hold U_Q ρ_t or U_K g_j

All are divided by √d_m, as the logit is. A constant added to all logits of a query changes nothing, so each term is
centred over the keys that a query sees, and its size is the mean absolute value over queries, keys and heads.

Axes: S seeds, E episodes, L layers, B batch, H heads, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uat.domains import split_seed
from uat.engines.rollout import RolloutRunner
from uat.episode import Batch
from uat.evaluation.intervals import interval
from uat.methods import Policy
from uat.methods.uat import UAT
from uat.nn.blocks import Block
from uat.nn.utility import LateGate
from uat.paper.mechanism.attention import centred
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

TERMS = ("ℓ0", "ℓ1", "ℓ2", "ℓ3", "offsets")
EPISODES, AT_ONCE = 256, 32


@torch.no_grad()
def term_sizes(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """Return the size (L, B) of each term in every layer, for each episode."""
    if not isinstance(policy, UAT) or policy.config.binding != "early":
        raise ValueError(f"{type(policy).__name__} has no gates of the paper, whose terms could be measured")
    trace = policy.eval().trace(batch)
    assert trace.input_LBTD is not None
    assert trace.gates is not None
    sizes: dict[str, list[Tensor]] = {name: [] for name in TERMS}
    geometry = policy.backbone.geometry(trace.input_LBTD.shape[2])
    for block, x_BTD, g_BTD in zip(policy.backbone.blocks, trace.input_LBTD, trace.gates.g, strict=True):
        assert isinstance(block, Block)
        assert g_BTD is not None
        assert not isinstance(g_BTD, LateGate)
        terms = block.attention.logit_terms(x_BTD, trace.gates.rho, g_BTD, geometry)
        split = {"ℓ0": terms[0, 0], "ℓ1": terms[0, 1], "ℓ2": terms[1, 0], "ℓ3": terms[1, 1]}
        split["offsets"] = terms[2].sum(0) + terms[0, 2] + terms[1, 2]
        for name, term_BHTT in split.items():
            size_BHTT = centred(term_BHTT).abs()
            real_B1T1 = batch.valid[:, None, :, None].expand_as(size_BHTT)
            sizes[name].append(size_BHTT.masked_fill(~real_B1T1, torch.nan).nanmean((1, 2, 3)))
    return {name: torch.stack(values) for name, values in sizes.items()}


@cpu_threads()
def terms_of_runs(
    runs: Sequence[Run], *, episodes: int = EPISODES, device: torch.device | str | None = None
) -> list[dict[str, Any]]:
    """Return one row per layer and term of runs that differ by seed alone: the size over their test episodes, with a
    95 % interval over seeds and episodes, and its share of all terms' sizes."""
    sizes = [_sizes_of(run, episodes, pick_device(device)) for run in runs]
    config, rows = runs[0].config, []
    place = {"domain": config.domain_name, "task": config.build_domain().task, "method": config.method_name}
    for layer in range(len(sizes[0]["ℓ0"])):
        own = {name: torch.stack([one[name][layer] for one in sizes]) for name in TERMS}
        total = sum(float(x_SE.double().mean()) for x_SE in own.values())
        for name, x_SE in own.items():
            low, high = interval(x_SE)
            value = float(x_SE.double().mean())
            about = {**place, "layer": layer + 1, "term": name}
            rows.append({**about, "value": value, "low": low, "high": high, "share": value / total, "n": x_SE.shape[1]})
    return rows


def _sizes_of(run: Run, episodes: int, device: torch.device) -> dict[str, Tensor]:
    """(L, E) sizes of each term in the first test episodes, which the policy plays greedily."""
    domain, policy = run.config.build_domain(), load_policy(run.path).to(device)
    episodes = min(domain.episode_count("test", episodes), episodes)
    player = RolloutRunner(policy, domain.simulator("test", device), device=device, sampled=False)
    parts: dict[str, list[Tensor]] = {name: [] for name in TERMS}
    for begin in range(0, episodes, AT_ONCE):
        trajectory = player.play(torch.arange(begin, min(begin + AT_ONCE, episodes)), split_seed("test", 0))
        for name, size_LB in term_sizes(policy, policy.spec.clock.batch(trajectory)).items():
            parts[name].append(size_LB.cpu())
    player.close()
    return {name: torch.cat(values, dim=1) for name, values in parts.items()}
