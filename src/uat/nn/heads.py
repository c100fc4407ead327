"""Heads that map the last representation to actions. Scoring some candidates reads no other row of the vocabulary.

Shapes: B batch, T time, D width, A actions, K candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.distributions import distribution
from uat.nn import vocabulary
from uat.spec import Box, Discrete, Items, Spec


class Head(nn.Module, ABC):
    """Linear map W h + b to the parameters of a distribution over actions; masked actions have probability zero."""

    def __init__(self, d_model: int, count: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, count, bias=bias)

    @property
    def bias_A(self) -> Tensor:
        """The bias b; zeros if the head has none."""
        bias_A = getattr(self.linear, "bias", None)
        return self.linear.weight.new_zeros(self.linear.out_features) if bias_A is None else bias_A

    def logits(self, h: Tensor, allowed: Tensor | None = None) -> Tensor:
        logits = self.linear(h)
        return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)

    @abstractmethod
    def nll(self, h: Tensor, target: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the loss (B, T) of every step."""

    def score(self, h: Tensor, candidates_K: Tensor) -> Tensor:
        """Return the logits (..., K) of the candidates only."""
        return torch.einsum("...kd,...d->...k", self.linear.weight[candidates_K], h) + self.bias_A[candidates_K]


@dataclass(frozen=True, slots=True)
class HeadAnswers:
    """Scores from the last representation, computed on demand for the requested candidates or episodes."""

    head: Head
    h_BD: Tensor
    allowed_BA: Tensor | None = None

    def among(self, candidate_BK: Tensor) -> Tensor:
        score_BK = self.head.score(self.h_BD, candidate_BK)
        return (
            score_BK
            if self.allowed_BA is None
            else score_BK.masked_fill(~self.allowed_BA.gather(1, candidate_BK), -torch.inf)
        )

    def every(self, episodes: slice) -> Tensor:
        return self.head.logits(self.h_BD[episodes], None if self.allowed_BA is None else self.allowed_BA[episodes])


class DiscreteHead(Head):
    def nll(self, h: Tensor, target: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return -log π(target); padding may have the target -1, whose loss is zero.

        Large vocabularies (`vocabulary.is_large`) are computed a few rows at a time.
        """
        if allowed is None and vocabulary.is_large(target.numel(), self.linear.out_features):
            rows = h.flatten(0, -2)
            loss_N = vocabulary.linear_cross_entropy(rows, self.linear.weight, self.bias_A, target.flatten())
            return loss_N.view(target.shape)
        logits_NA = self.logits(h, allowed).flatten(0, -2)
        return F.cross_entropy(logits_NA, target.flatten(), ignore_index=-1, reduction="none").view(target.shape)


class ItemHead(DiscreteHead):
    """Head whose table also embeds the items: an item's score is the product with its own embedding."""

    def __init__(self, d_model: int, count: int, *, bias: bool) -> None:
        super().__init__(d_model, count, bias=bias)
        nn.init.normal_(self.linear.weight, std=0.02)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., D) of item ids; the id -1 ("none") gives exactly zero."""
        return F.embedding(ids.clamp_min(0), self.linear.weight) * (ids >= 0)[..., None]


class WeightsHead(Head):
    def nll(self, h: Tensor, target: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return KL(target ‖ π); entries with a target of zero add nothing."""
        log_pi = self.logits(h, allowed).log_softmax(-1)
        held = target > 0
        terms = target * (torch.where(held, target, 1.0).log() - log_pi.masked_fill(~held, 0.0))
        return terms.sum(-1)


class BoxHead(Head):
    """Means and log standard deviations of a Gaussian that is squashed to the limits of a box."""

    def __init__(self, d_model: int, spec: Spec, box: Box) -> None:
        super().__init__(d_model, box.numbers)
        self.spec, self.box = spec, box

    def logits(self, h: Tensor, allowed: Tensor | None = None) -> Tensor:
        if allowed is not None:
            self.box.refuse_mask()
        return self.linear(h)

    def nll(self, h: Tensor, target: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the negative log-density at the target; targets in padding may be any number."""
        known = torch.where(target.isfinite(), target, 0.0).to(h.dtype)
        return -distribution(self.spec, self.logits(h, allowed)).log_prob(known)


def build_head(spec: Spec, d_model: int) -> Head:
    if isinstance(spec.action, Box):
        return BoxHead(d_model, spec, spec.action)
    kind = DiscreteHead if isinstance(spec.action, Discrete) else WeightsHead
    return kind(d_model, spec.action.count)


def unsupported_items(spec: Spec) -> str | None:
    """Return why a method that recommends observed items does not support this problem; None: it does."""
    if isinstance(spec.obs, Items) and isinstance(spec.action, Discrete) and spec.obs.count == spec.action.count:
        return None
    return f"recommends the items that it observes: it takes as many items as actions, not {spec.obs} and {spec.action}"
