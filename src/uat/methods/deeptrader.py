"""DeepTrader: an asset unit that scores all assets jointly, and a market unit that sets the share of cash.

Source: Wang, Huang, Tu, Zhang and Xu, "DeepTrader: A Deep Reinforcement Learning Approach for Risk-Return Balanced
Portfolio Management with Market Conditions Embedding" (AAAI 2021).

  asset unit     L blocks over days and assets: a dilated causal convolution, a graph convolution over the correlation
                 of returns and over a learned graph, spatial attention S = softmax(V relu(Q K')), a residual; then a
                 score s_i = sigmoid(w · h_i) for each asset
  market unit    an LSTM over the market's conditions and attention over its past give the share ρ of cash
  portfolio      ρ in cash; 1 - ρ over the G assets with the highest scores, by the softmax of these

  asset unit learns       Σ_i softmax(s)_i z_i         z: returns of the day, standardised across assets
  market unit learns      mean return / softplus(largest drawdown) of the window's portfolio

Prices do not depend on actions, so the return of any portfolio is known, and gradients are exact.

Differences from the paper
  1. long only: what the paper sells short, ρ, is cash here. The paper's
     reward of ρ, only the drawdown, would then be best with no asset held;
     the authors' code also divides the return by it                     test_the_market_unit_holds_back_where_it_falls
  2. exact gradients of both rewards; the paper samples ρ from a Gaussian
     and weighs its likelihood                                           test_losses_equal_the_equations
  3. the asset unit's reward has no logarithm around it, which would be
     undefined below zero                                                test_losses_equal_the_equations
  4. correlation is that of the indicators' daily changes in the episode
     so far, since returns are not observed; the paper's graph is fixed  test_the_graph_is_the_correlation_of_changes
  5. attention across assets is computed at every step, over the output
     of the convolutions; in the paper once per window                   test_a_block_equals_the_equations
  6. LayerNorm instead of BatchNorm, so that a stream needs no batch     test_streaming_equals_all_at_once
  7. market conditions are mean and deviation of the indicators over the
     assets that trade; the paper has an index and macro data            test_the_market_is_seen_as_mean_and_deviation
  8. assets outside the best G have a weight of about e^-40, not zero    test_only_the_best_assets_are_held

Axes: B batch, T time, N and M assets, F indicators, D width, A cash and assets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.contracts import Memory
from uat.episode import Batch, Losses, Step, masked_sum
from uat.methods.policy import Phase, Policy
from uat.methods.portfolio import FAR, masked, relatives, tradable, unsupported_portfolio
from uat.nn.recurrent import LSTM, AdditiveAttention, LSTMState
from uat.settings import Decay, Layers, Width, check_fields
from uat.spec import Assets, Spec

LITTLE = 40.0
"""Amount subtracted from the scores of assets outside the best G."""
TINY = 1e-8
STILL = 1e-6
"""Smallest deviation of returns across assets; smaller differences count as equal returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepTraderConfig:
    d_asset: Width = 64
    """Width of the asset unit."""
    d_spatial: Width = 8
    """Width of queries and keys in the attention across assets."""
    num_blocks: Layers = 4
    """Blocks of the asset unit; block l looks back 2^l days further than the block before."""
    d_market: Width = 32
    """Width of the market unit."""
    winners: Width = 4
    """Number of assets to hold, G."""
    graph_decay: Decay = 0.97
    """Weight of yesterday's correlation statistics today."""
    dropout: Decay = 0.5
    """Dropout in the asset unit, as a share of activations."""

    def __post_init__(self) -> None:
        check_fields(self)


class Block(nn.Module):
    """One layer of the asset unit, on (..., N, D). Leading axes are (B, T), or (B,) in a step."""

    def __init__(self, config: DeepTraderConfig, assets: int, dilation: int) -> None:
        super().__init__()
        d = config.d_asset
        self.dilation = dilation
        self.temporal = nn.Linear(2 * d, d)
        self.graph = nn.Linear(3 * d, d)
        self.query, self.key = (nn.Linear(d, config.d_spatial, bias=False) for _ in range(2))
        self.among = nn.Linear(assets, assets)  # V
        self.residual = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, now: Tensor, before: Tensor, graphs: tuple[Tensor, Tensor], tradable_mask: Tensor) -> Tensor:
        """Apply the block. before: the input `dilation` days earlier; graphs: weights (..., N, M) of assets M for N."""
        x = self.drop(F.relu(self.temporal(torch.cat([now, before], dim=-1))))
        x = self.drop(self.graph(torch.cat([x, *(graph @ x for graph in graphs)], dim=-1)))
        affinity = F.relu(self.query(x) @ self.key(x).transpose(-1, -2))
        return self.norm(_shares(self.among(affinity), tradable_mask) @ x + self.residual(now))


@dataclass(slots=True)
class DeepTraderState(Memory):
    days_BKND: list[Tensor]
    """Inputs of each block in the last days, oldest first; K is the block's dilation."""
    obs_BNF: Tensor
    """Observation of the day before."""
    together_BNN: Tensor
    """Discounted sums of products of the assets' changes."""
    memory_BD: LSTMState
    seen_BSD: Tensor
    """Past hidden states of the market unit."""
    length_B: Tensor


class DeepTrader(Policy):
    config: DeepTraderConfig

    def __init__(self, spec: Spec, config: DeepTraderConfig) -> None:
        super().__init__(spec, config)
        assert isinstance(spec.obs, Assets)
        c, self.assets, self.indicators = config, spec.obs.count, spec.obs.features
        self.enter = nn.Linear(self.indicators, c.d_asset)
        self.blocks = nn.ModuleList(Block(c, self.assets, 2**layer) for layer in range(c.num_blocks))
        self.place = nn.Parameter(torch.randn(self.assets, 1))
        self.score = nn.Linear(c.d_asset, 1)
        self.market = LSTM(2 * self.indicators, c.d_market)
        self.recall = AdditiveAttention(c.d_market)
        self.caution = nn.Linear(2 * c.d_market, 1)

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        return unsupported_portfolio(spec)

    # ------------------------------------------------------------ all steps at once

    def features(self, batch: Batch) -> Tensor:
        """Return (B, T, A): the logit of ρ, and a score in (0, 1) for each asset."""
        obs_BTNF = batch.obs.to(self.place.dtype)
        tradable_BTN = tradable(batch.allowed, obs_BTNF[..., 0])
        graphs = self._graphs(self.correlated(obs_BTNF), tradable_BTN)
        x_BTND = self.enter(obs_BTNF)
        for block in self._blocks():
            before_BTND = F.pad(x_BTND, (0, 0, 0, 0, block.dilation, 0))[:, : x_BTND.shape[1]]
            x_BTND = block(x_BTND, before_BTND, graphs, tradable_BTN)
        hidden_BTD = self.market(conditions(obs_BTNF, tradable_BTN))
        caution_BT1 = self.caution(torch.cat([hidden_BTD, self.recall(hidden_BTD)], dim=-1))
        return torch.cat([caution_BT1, self.score(x_BTND)[..., 0].sigmoid()], dim=-1)

    @torch.no_grad()
    def correlated(self, obs_BTNF: Tensor) -> Tensor:
        """Return discounted sums (B, T, N, N) of products of the assets' changes, up to each day."""
        change_BTNF = F.pad(obs_BTNF[:, 1:] - obs_BTNF[:, :-1], (0, 0, 0, 0, 1, 0))
        day_T = torch.arange(obs_BTNF.shape[1], device=obs_BTNF.device)
        age_TT = (day_T[:, None] - day_T).to(obs_BTNF.dtype)
        weight_TT = torch.where(age_TT >= 0, self.config.graph_decay ** age_TT.clamp_min(0), 0.0)
        product_BTNN = change_BTNF @ change_BTNF.transpose(-1, -2)
        return (weight_TT @ product_BTNN.flatten(2)).view_as(product_BTNN)

    def logits(self, batch: Batch) -> Tensor:
        return self.allocate(self.features(batch), batch.allowed)

    def allocate(self, features: Tensor, allowed: Tensor | None) -> Tensor:
        """Return log weights (..., A): ρ in cash, the rest over the best assets by the softmax of their scores."""
        caution, score = features[..., :1], features[..., 1:]
        score = score.masked_fill(~tradable(allowed, score), -FAR)
        least = score.topk(min(self.config.winners, self.assets), dim=-1).values[..., -1:]
        kept = torch.where(score >= least, score, score - LITTLE).log_softmax(-1)
        return masked(torch.cat([F.logsigmoid(caution), F.logsigmoid(-caution) + kept], dim=-1), allowed)

    # ------------------------------------------------------------ learning

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase. Actions do not change prices, so the expert plays, which is cheapest."""
        return (Phase("rewards", self.loss, behaviour=Behaviour(0.0)),)

    def loss(self, batch: Batch) -> Losses:
        features_BTA = self.features(batch)
        return_BTN = relatives(batch)[..., 1:] - 1
        held_BTN = tradable(batch.allowed, return_BTN) & batch.valid[..., None]
        share_BTN = _shares(features_BTA[..., 1:], held_BTN)
        gained_BT = (share_BTN * across(return_BTN, held_BTN)).sum(-1)
        ratio_B = reward_of_risk(self._earned(features_BTA, batch.allowed, return_BTN), batch.valid)
        return {
            "assets": masked_sum(-gained_BT, batch.valid),
            "market": masked_sum(-self.spec.reward_scale * ratio_B, batch.valid[:, 0]),
        }

    def _earned(self, features_BTA: Tensor, allowed: Tensor | None, return_BTN: Tensor) -> Tensor:
        """Return the portfolio's returns (B, T) as a function of ρ; the assets' shares get no gradient here."""
        with torch.no_grad():
            weights_BTN = self.allocate(features_BTA, allowed)[..., 1:].exp()
            share_BTN = weights_BTN / weights_BTN.sum(-1, keepdim=True).clamp_min(TINY)
        return (-features_BTA[..., 0]).sigmoid() * (share_BTN * return_BTN).sum(-1)

    # ------------------------------------------------------------ acting

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> DeepTraderState:
        zeros, n = self.place.new_zeros, self.assets
        return DeepTraderState(
            days_BKND=[zeros(streams, block.dilation, n, self.config.d_asset) for block in self._blocks()],
            obs_BNF=zeros(streams, n, self.indicators),
            together_BNN=zeros(streams, n, n),
            memory_BD=self.market.begin(streams),
            seen_BSD=zeros(streams, capacity, self.config.d_market),
            length_B=torch.zeros(streams, dtype=torch.long, device=self.place.device),
        )

    def step(self, state: DeepTraderState, step: Step) -> tuple[Tensor, DeepTraderState]:
        first_B11, obs_BNF = step.first[:, None, None], step.obs.to(self.place.dtype)
        tradable_BN = tradable(step.allowed, obs_BNF[..., 0])
        change_BNF = (obs_BNF - state.obs_BNF).masked_fill(first_B11, 0.0)
        together_BNN = state.together_BNN.masked_fill(first_B11, 0.0) * self.config.graph_decay
        together_BNN = together_BNN + change_BNF @ change_BNF.transpose(-1, -2)
        graphs = self._graphs(together_BNN, tradable_BN)
        x_BND, days = self.enter(obs_BNF), []
        for block, past in zip(self._blocks(), state.days_BKND, strict=True):
            past = past.masked_fill(first_B11[..., None], 0.0)
            days.append(torch.cat([past[:, 1:], x_BND[:, None]], dim=1))
            x_BND = block(x_BND, past[:, 0], graphs, tradable_BN)
        caution_B1, memory, seen_BSD, length_B = self._caution(state, step.first, conditions(obs_BNF, tradable_BN))
        features_BA = torch.cat([caution_B1, self.score(x_BND)[..., 0].sigmoid()], dim=-1)
        after = DeepTraderState(days, obs_BNF, together_BNN, memory, seen_BSD, length_B)
        return self.allocate(features_BA, step.allowed), after

    def _caution(
        self, state: DeepTraderState, first_B: Tensor, market_BI: Tensor
    ) -> tuple[Tensor, LSTMState, Tensor, Tensor]:
        """Return the logit of ρ, and the market unit's memory after this step."""
        hidden, cell = (part.masked_fill(first_B[:, None], 0.0) for part in state.memory_BD)
        memory = self.market.step((hidden, cell), market_BI)
        length_B = state.length_B.masked_fill(first_B, 0)
        slot_S = torch.arange(state.seen_BSD.shape[1], device=length_B.device)
        seen_BSD = torch.where((slot_S == length_B[:, None])[..., None], memory[0][:, None], state.seen_BSD)
        visible_BTS = (slot_S <= length_B[:, None])[:, None]
        recalled_BD = self.recall.recall(seen_BSD, memory[0][:, None], visible_BTS)[:, 0]
        return self.caution(torch.cat([memory[0], recalled_BD], dim=-1)), memory, seen_BSD, length_B + 1

    # ------------------------------------------------------------ graphs

    def _graphs(self, together: Tensor, tradable_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the graphs of correlation and of learned affinity, with rows (..., N, M) over tradable assets."""
        affinity_NN = F.relu(self.place @ self.place.T)
        return correlation(together, tradable_mask), _shares(affinity_NN.expand_as(together), tradable_mask)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]


def correlation(together: Tensor, tradable_mask: Tensor) -> Tensor:
    """Return positive correlations (..., N, M) with rows normalised to one; zeros before the first price change."""
    size = together.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    graph = F.relu(together) / (size[..., :, None] * size[..., None, :]).clamp_min(TINY)
    graph = graph * tradable_mask[..., None, :]
    return graph / graph.sum(-1, keepdim=True).clamp_min(TINY)


def conditions(obs: Tensor, tradable_mask: Tensor) -> Tensor:
    """Return the mean and deviation (..., 2F) of every indicator over the tradable assets."""
    weight = (tradable_mask / tradable_mask.sum(-1, keepdim=True).clamp_min(1)).to(obs.dtype)[..., None]
    mean = (weight * obs).sum(-2)
    return torch.cat([mean, (weight * (obs - mean[..., None, :]).square()).sum(-2).sqrt()], dim=-1)


def across(return_BTN: Tensor, held_BTN: Tensor) -> Tensor:
    """Standardise each day's returns across the assets that may be held; other assets get zero."""
    count_BT1 = held_BTN.sum(-1, keepdim=True).clamp_min(1)
    centred_BTN = (return_BTN - (return_BTN * held_BTN).sum(-1, keepdim=True) / count_BT1) * held_BTN
    return centred_BTN / (centred_BTN.square().sum(-1, keepdim=True) / count_BT1).sqrt().clamp_min(STILL)


def reward_of_risk(earned_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the mean return over softplus(largest drawdown) of every episode, (B,)."""
    log_BT = F.pad(torch.log1p(earned_BT).cumsum(1), (1, 0))
    fallen_B = (log_BT.cummax(1).values - log_BT).amax(1)
    mean_B = earned_BT.sum(1) / valid_BT.sum(1).clamp_min(1)
    return mean_B / F.softplus(-torch.expm1(-fallen_B))


def _shares(score: Tensor, tradable_mask: Tensor) -> Tensor:
    """Softmax over the tradable assets; a mask (..., M) applies to every row of scores (..., N, M)."""
    if score.dim() > tradable_mask.dim():
        tradable_mask = tradable_mask[..., None, :]
    return score.masked_fill(~tradable_mask, -FAR).softmax(-1)
