"""SARL: reinforcement learning for portfolios, with predicted price movements in the state.

Source: Ye, Pei, Wang, Chen, Zhu, Xiao and Li, "Reinforcement-Learning based Portfolio Management with Augmented Asset
Movement Prediction States" (AAAI 2020). Its policy network is that of Jiang, Xu and Liang (2017): identical evaluators,
one for each asset with shared weights, and a learned score of cash.

  movement   δ_it = P(asset i rises by the next close | o_i1 .. o_it)    one LSTM for all assets, trained first
  state      s_it = [o_it; δ_it]                                         of the last W days
  policy     w_t = softmax([c; f(s_i,t-W+1 .. s_it)])                    convolution over days, whole window, score
  learning   maximise the mean of log(w_t · y_t)                         deterministic policy gradient: y is known

Actions do not move prices, so the return of any weights and its gradient are known exactly.

Differences from the paper
  1. the predictor reads prices' indicators alone, as for the paper's
     Bitcoin data; there is no news                                        test_movements_that_can_be_told_are_learnt
  2. the weights of the day before are not an input, so the policy sees
     no feedback, and the objective has no trading costs                   test_feedback_is_seen_exactly_as_declared
  3. the predictor is frozen after its training                            test_the_portfolio_leaves_the_predictor_alone
  4. assets that may not be held have no weight                            test_masked_actions_have_probability_zero

Axes: B batch, T time, N assets, F indicators, C indicators plus movement, W days of the state, A cash and assets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.contracts import Memory
from uat.episode import Batch, Losses, Step, masked_sum
from uat.methods.policy import Phase, Policy
from uat.methods.portfolio import RELATIVE, masked, relatives, tradable, unsupported_portfolio
from uat.nn.recurrent import LSTM, LSTMState
from uat.settings import MOST_STEPS, Between, Inner, Width, check_fields
from uat.spec import Assets, Spec

KERNEL = 3
"""Days of the first convolution, as in Jiang et al."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SARLConfig:
    d_movement: Width = 32
    """Width of the LSTM that predicts movements."""
    movement_share: Inner = 0.04
    """Epochs of the movement predictor's training, as a share of `train.epochs`."""
    window: Annotated[int, Between(KERNEL, MOST_STEPS)] = 20
    """Days in the policy's state."""
    channels: Width = 8
    """Channels of the convolution over days."""
    d_evaluator: Width = 20
    """Width of each asset's evaluator."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True)
class SARLState(Memory):
    memory_BND: LSTMState
    """LSTM state of the predictor."""
    recent_BNCW: Tensor
    """States of the last days, newest last; zeros before the first day."""


class SARL(Policy):
    config: SARLConfig

    def __init__(self, spec: Spec, config: SARLConfig) -> None:
        super().__init__(spec, config)
        assert isinstance(spec.obs, Assets)
        c = config
        self.assets, self.d_state = spec.obs.count, spec.obs.features + 1
        self.predictor = LSTM(spec.obs.features, c.d_movement)
        self.rise = nn.Linear(c.d_movement, 1)
        self.days = nn.Conv1d(self.d_state, c.channels, KERNEL)
        self.evaluator = nn.Conv1d(c.channels, c.d_evaluator, c.window - KERNEL + 1)
        self.score = nn.Linear(c.d_evaluator, 1)
        self.cash = nn.Parameter(torch.zeros(1))

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        return unsupported_portfolio(spec)

    # ------------------------------------------------------------ movement

    def movement(self, obs_BTNF: Tensor) -> Tensor:
        """Return the logits (B, T, N) of a rise by the next close."""
        rows = obs_BTNF.transpose(1, 2).flatten(0, 1).to(self.cash.dtype)
        return self.rise(self.predictor(rows))[..., 0].view(len(obs_BTNF), self.assets, -1).transpose(1, 2)

    def movement_loss(self, batch: Batch) -> Losses:
        """Return the cross-entropy of rises, over the assets that may be held."""
        logits_BTN = self.movement(batch.obs)
        rose_BTN = (relatives(batch)[..., 1:] > 1).to(logits_BTN.dtype)
        each_BTN = F.binary_cross_entropy_with_logits(logits_BTN, rose_BTN, reduction="none")
        held_BTN = tradable(batch.allowed, logits_BTN) & batch.valid[..., None]
        return {"movement": masked_sum(each_BTN, held_BTN)}

    # ------------------------------------------------------------ portfolio

    def features(self, batch: Batch) -> Tensor:
        """Return the scores (B, T, A) of cash and each asset."""
        with torch.no_grad():
            delta_BTN = self.movement(batch.obs).sigmoid()
        state_BTNC = torch.cat([batch.obs.to(delta_BTN.dtype), delta_BTN[..., None]], dim=-1)
        rows = F.pad(state_BTNC.permute(0, 2, 3, 1).flatten(0, 1), (self.config.window - 1, 0))  # (B N, C, W - 1 + T)
        return self._with_cash(self.evaluate(rows).view(len(batch.obs), self.assets, -1).transpose(1, 2))

    def evaluate(self, rows: Tensor) -> Tensor:
        """Return a score for every complete window of days: (rows, days - W + 1)."""
        inner = F.relu(self.evaluator(F.relu(self.days(rows))))
        return self.score(inner.transpose(1, 2))[..., 0]

    def _with_cash(self, score: Tensor) -> Tensor:
        """Prepend the score of cash to the scores of assets."""
        return torch.cat([self.cash.expand(*score.shape[:-1], 1), score], dim=-1)

    def logits(self, batch: Batch) -> Tensor:
        return masked(self.features(batch), batch.allowed)

    def loss(self, batch: Batch) -> Losses:
        """Return the negative log growth over real steps, in the clock's units."""
        weights_BTA = self.features(batch).masked_fill(_forbidden(batch), -torch.inf).softmax(-1)
        growth_BT = (weights_BTA * relatives(batch)).sum(-1)
        return {"growth": masked_sum(-self.spec.reward_scale * growth_BT.log(), batch.valid)}

    def phases(self) -> tuple[Phase, ...]:
        """Return both phases. Actions do not change prices, so the expert plays, which is cheapest."""
        log, share = Behaviour(0.0), self.config.movement_share
        return (
            Phase("movement", self.movement_loss, behaviour=log, share=share, judged_by="nothing"),
            Phase("portfolio", self.loss, behaviour=log),
        )

    # ------------------------------------------------------------ acting

    @property
    def endless(self) -> bool:
        """True: the memory is the state of an LSTM and a window of days."""
        return True

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> SARLState:
        recent = self.cash.new_zeros(streams, self.assets, self.d_state, self.config.window)
        return SARLState(self._by_stream(self.predictor.begin(streams * self.assets)), recent)

    def step(self, state: SARLState, step: Step) -> tuple[Tensor, SARLState]:
        obs_BNF = step.obs.to(self.cash.dtype)
        first_R1 = step.first.repeat_interleave(self.assets)[:, None]
        hidden, cell = (part.flatten(0, 1).masked_fill(first_R1, 0.0) for part in state.memory_BND)
        memory = self.predictor.step((hidden, cell), obs_BNF.flatten(0, 1))
        delta_BN = self.rise(memory[0])[..., 0].sigmoid().view(-1, self.assets)
        now_BNC = torch.cat([obs_BNF, delta_BN[..., None]], dim=-1)
        before_BNCW = state.recent_BNCW.masked_fill(step.first[:, None, None, None], 0.0)
        recent_BNCW = torch.cat([before_BNCW[..., 1:], now_BNC[..., None]], dim=-1)
        score_BN = self.evaluate(recent_BNCW.flatten(0, 1)).view(-1, self.assets)
        return masked(self._with_cash(score_BN), step.allowed), SARLState(self._by_stream(memory), recent_BNCW)

    def _by_stream(self, memory: LSTMState) -> LSTMState:
        """Reshape both tensors from (B N, D) to (B, N, D)."""
        hidden, cell = (part.unflatten(0, (-1, self.assets)) for part in memory)
        return hidden, cell


def _forbidden(batch: Batch) -> Tensor:
    """Mask (B, T, A) of what may not be held; all False in padding, whose contents are arbitrary."""
    if batch.allowed is None:
        return torch.zeros_like(batch.facts[RELATIVE], dtype=torch.bool)
    return ~batch.allowed & batch.valid[..., None]
