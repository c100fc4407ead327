"""Performance of a series of daily returns, as one value per day whose mean is the measure.

Sharpe ratio, growth, volatility and drawdown are not means over days. Each is therefore given as

  z_t = measure + influence of day t      (the influences sum to zero)

so that means, deviations between seeds and intervals are computed as for any other metric. The interval of such a mean
is that of the delta method. Returns that follow each other in time are not independent: see `block` in the domain.

Axes: E days in the order of time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DAYS = 252
"""Trading days of a year."""
NEARLY_NOTHING = 1e-12


def sharpe(return_E: Tensor) -> Tensor:
    """Annualised mean over sample standard deviation; 0 for constant returns."""
    centred_E, variance, root = _moments(return_E)
    deviation = (variance * _sample(return_E)).sqrt()
    ratio = root * return_E.mean() / deviation.clamp_min(NEARLY_NOTHING)
    if deviation <= NEARLY_NOTHING:
        return torch.zeros_like(return_E)
    return ratio + root * centred_E / deviation - ratio * (centred_E.square() - variance) / (2 * variance)


def volatility(return_E: Tensor) -> Tensor:
    """Annualised sample standard deviation."""
    centred_E, variance, root = _moments(return_E)
    value = root * (variance * _sample(return_E)).sqrt()
    return value + value * (centred_E.square() - variance) / (2 * variance.clamp_min(NEARLY_NOTHING**2))


def cagr(return_E: Tensor) -> Tensor:
    """Annual growth: wealth^(252 / days) - 1."""
    yearly_E = DAYS * torch.log1p(return_E)
    growth = yearly_E.mean()
    return torch.expm1(growth) + growth.exp() * (yearly_E - growth)


def max_drawdown(return_E: Tensor) -> Tensor:
    """Largest fall of wealth from a peak, as a share of the peak; its days are those from that peak to the low."""
    log_E = torch.log1p(return_E)
    wealth_E = torch.cat([log_E.new_zeros(1), log_E.cumsum(0)])
    low = int((wealth_E.cummax(0).values - wealth_E).argmax())
    peak = int(wealth_E[: low + 1].argmax())
    fallen = wealth_E[peak] - wealth_E[low]
    day_E = torch.arange(len(return_E), device=return_E.device)
    share_E = -log_E * ((day_E >= peak) & (day_E < low)) * len(return_E)  # the mean of these is the fall
    return -torch.expm1(-fallen) + (-fallen).exp() * (share_E - fallen)


def _moments(return_E: Tensor) -> tuple[Tensor, Tensor, float]:
    centred_E = return_E - return_E.mean()
    return centred_E, centred_E.square().mean(), math.sqrt(DAYS)


def _sample(return_E: Tensor) -> float:
    """Return the factor from the variance of these days to the unbiased estimate."""
    return len(return_E) / max(len(return_E) - 1, 1)
