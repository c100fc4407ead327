"""Distributions over actions, for choosing, imitating and learning from rewards.

A policy answers with one row of numbers for each stream, `spec.action.numbers` of them: logits of ids, logits of
weights, or means and log-deviations of a Gaussian that is squashed into a box. Axes: (..., A), the last one the
action's, or its numbers'.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uat.noise import gumbel, uniform
from uat.spec import Box, Discrete, Spec

LEAST_LOG_STD, MOST_LOG_STD = -5.0, 2.0
"""Log-deviations are clamped to these, as in soft actor-critic."""
EDGE = 1e-6
"""Minimum distance of an action from a limit, as a share of the half range: at the limit the density is undefined."""
NODES = 32
"""Number of points of the quadrature for the entropy of a squashed Gaussian."""


class Distribution(ABC):
    """A distribution over the actions of each stream and step."""

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """Return the greedy action."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Return the action that is sampled with this noise (see `action_noise`)."""

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """(...) log-probability of an action; log-density where actions are continuous."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """(...) in nats."""


@dataclass(frozen=True, slots=True)
class Categorical(Distribution):
    """A distribution over ids, given by logits; minus infinity for ids that are not allowed."""

    logits: Tensor

    @property
    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Gumbel noise: the arg-max of logits + noise is a sample of the softmax."""
        return (self.logits + noise).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """(...) log-probability of ids; the id -1 ("none") counts as 0."""
        return self.logits.log_softmax(-1).gather(-1, action.clamp_min(0)[..., None])[..., 0]

    @property
    def entropy(self) -> Tensor:
        return _entropy(self.logits)


@dataclass(frozen=True, slots=True)
class Shares(Distribution):
    """Weights that sum to one: the action is the softmax itself, without randomness. The log-probability of other
    weights is the expected log-probability of an asset drawn with them."""

    logits: Tensor

    @property
    def mode(self) -> Tensor:
        return self.logits.softmax(-1)

    def sample(self, noise: Tensor) -> Tensor:
        return self.mode

    def log_prob(self, action: Tensor) -> Tensor:
        return torch.where(action > 0, action * self.logits.log_softmax(-1), 0.0).sum(-1)

    @property
    def entropy(self) -> Tensor:
        return _entropy(self.logits)


@dataclass(frozen=True, slots=True)
class SquashedGaussian(Distribution):
    """A box: u is normal in each dimension, independently, and the action is low + (high - low) (1 + tanh u) / 2."""

    numbers: Tensor
    """(..., 2A) means, then log-deviations."""
    low: Tensor
    high: Tensor

    @property
    def mean(self) -> Tensor:
        return self.numbers.chunk(2, dim=-1)[0]

    @property
    def log_std(self) -> Tensor:
        return self.numbers.chunk(2, dim=-1)[1].clamp(LEAST_LOG_STD, MOST_LOG_STD)

    @property
    def mode(self) -> Tensor:
        """The squashed mean of u, which is the median of each dimension."""
        return self._squashed(self.mean)

    def sample(self, noise: Tensor) -> Tensor:
        """Standard normal noise."""
        return self._squashed(self.mean + self.log_std.exp() * noise)

    def log_prob(self, action: Tensor) -> Tensor:
        share = 2 * (action - self.low) / (self.high - self.low) - 1
        u = share.clamp(-1 + EDGE, 1 - EDGE).atanh()
        z = (u - self.mean) * (-self.log_std).exp()
        gaussian = -0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return (gaussian - self._log_slope(u)).sum(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the Gaussian plus the mean log-slope of the squashing, by Gauss-Hermite quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        node_N, weight_N = (torch.as_tensor(x).to(self.numbers) for x in (nodes, weights / weights.sum()))
        u = self.mean[..., None] + self.log_std.exp()[..., None] * node_N
        stretched = (self._log_slope(u.movedim(-1, -2)) * weight_N[:, None]).sum(-2)
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e) + stretched).sum(-1)

    def _squashed(self, u: Tensor) -> Tensor:
        share = (1 + u.tanh()) / 2
        return torch.minimum(torch.maximum(self.low + (self.high - self.low) * share, self.low), self.high)

    def _log_slope(self, u: Tensor) -> Tensor:
        """log of d action / d u, which is (high - low) (1 - tanh² u) / 2."""
        return ((self.high - self.low) / 2).log() + 2 * (math.log(2) - u - F.softplus(-2 * u))


def _entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)  # its gradient is zero, too
    return -(log_p.exp() * finite).sum(-1)


def distribution(spec: Spec, numbers: Tensor, allowed: Tensor | None = None) -> Distribution:
    """Return the distribution that a policy's numbers describe; actions that are not allowed have probability zero."""
    action = spec.action
    if isinstance(action, Box):
        if allowed is not None:
            action.refuse_mask()
        return SquashedGaussian(numbers, *limits(action, numbers.device, numbers.dtype))
    masked = numbers if allowed is None else numbers.masked_fill(~allowed, -torch.inf)
    return Categorical(masked) if isinstance(action, Discrete) else Shares(masked)


@lru_cache(maxsize=16)
def limits(box: Box, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the limits on a device, copied once: a CUDA graph cannot contain copies from the host."""
    return torch.tensor(box.low, dtype=dtype).to(device), torch.tensor(box.high, dtype=dtype).to(device)


def choose(numbers: Tensor, spec: Spec, noise: Tensor | None = None) -> Tensor:
    """Return the action of each stream: the mode, or a sample if noise is given."""
    chosen = distribution(spec, numbers)
    return chosen.mode if noise is None else chosen.sample(noise)


def action_noise(spec: Spec, seed: int, name: str, ids_B: Tensor, steps: int) -> Tensor | None:
    """Return the noise (B, T, A) that decides sampled actions of these episodes; None if actions are never drawn."""
    shape = (len(ids_B), steps, spec.action.count)
    if isinstance(spec.action, Discrete):
        return gumbel(seed, name, ids_B, steps * spec.action.count).view(shape).float()
    if isinstance(spec.action, Box):
        return torch.special.ndtri(uniform(seed, name, ids_B, steps * spec.action.count)).view(shape).float()
    return None
