"""BERT4Rec: a bidirectional Transformer over items that fills gaps.

Source: Sun et al. 2019, "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from
Transformer" (CIKM).

To decide at step t, a mask token follows the items seen so far, o_1 .. o_t [mask]. Every token attends to every other
one, and the output at the mask is the decision. Training is a Cloze test: in o_1 .. o_T [mask], mask tokens replace a
share of the items, and the target at each mask is that of the decision there: the decision of step t lies at the
position of o_{t+1}. One pass serves a whole episode.

  x_s = Dropout(LN(E_{o_s} + p_s)), with m in place of E_{o_s} at a mask
  x   = L blocks of `nn/bidirectional.py`
  r   = E LN(GELU(W x + b)) + b_O              at the masks; the table E that embeds items also scores them

Acting computes the whole prefix again at each step, since a new token changes the representations of all others.
Embedded items and the first layer's keys and values do not change, and are cached.

Differences from the paper
  1. the target at a mask is the domain's; where targets are the next
     items, it is the item under the mask                                test_cloze_learns_a_toy_alphabet_exactly
  2. the last position is always a mask, the first never, since no
     step decides there; the paper adds sequences with only the last
     mask, here a share of the episodes is like that                     test_what_is_masked
  3. `Batch.start` has no effect, and episodes longer than the
     horizon are refused                                                 test_longer_episodes_are_refused
Choices that the paper leaves open, taken from the authors' code: LayerNorm after the embedding and after GELU(W x + b);
matrices start at N(0, 0.02²), biases at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat.clock import NO_ACTION
from uat.contracts import Memory
from uat.episode import Batch, Losses, Step, masked_sum
from uat.methods.policy import Policy
from uat.methods.sasrec import start_small
from uat.nn.bidirectional import BidirectionalTransformer
from uat.nn.blocks import BackboneConfig
from uat.nn.heads import ItemHead, unsupported_items
from uat.noise import uniform
from uat.settings import Share
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class BERT4RecConfig(BackboneConfig):
    mask_share: Share = 0.2
    """Share of the items that the Cloze test masks."""
    last_share: Share = 0.1
    """Share of the training episodes in which only the last position is a mask, as in acting."""


@dataclass(slots=True)
class BERT4RecState(Memory):
    x_BSD: Tensor
    """Embedded items, followed by the mask token, which the next item overwrites."""
    kv_BSF: Tensor
    """Keys and values of these tokens in the first layer."""
    length_B: Tensor
    """Items that each stream has seen."""


class BERT4Rec(Policy):
    config: BERT4RecConfig
    head: ItemHead
    sampling_seed: Tensor
    """Seed of the masks of the Cloze test."""

    def __init__(self, spec: Spec, config: BERT4RecConfig) -> None:
        super().__init__(spec, config)
        head = ItemHead(config.d_model, spec.action.count, bias=True)
        self.head = head  # pyright: ignore[reportIncompatibleVariableOverride]
        self.mask_D = nn.Parameter(torch.empty(config.d_model))
        self.places_SD = nn.Parameter(torch.empty(self._places(spec), config.d_model))
        for parameter in (self.mask_D, self.places_SD):
            nn.init.normal_(parameter, std=0.02)
        self.norm, self.drop = nn.LayerNorm(config.d_model), nn.Dropout(config.dropout)
        self.backbone = BidirectionalTransformer(config)
        self.answer = nn.Sequential(nn.Linear(config.d_model, config.d_model), nn.GELU(), nn.LayerNorm(config.d_model))
        self.register_buffer("sampling_seed", torch.zeros((), dtype=torch.long), persistent=False)
        for part in (self.backbone, self.answer):
            start_small(part)

    def sampling_seeds(self) -> list[Tensor]:
        return [self.sampling_seed]

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        if spec.horizon is None:
            return "needs a horizon for its table of positions, not None"
        return unsupported_items(spec)

    @staticmethod
    def _places(spec: Spec) -> int:
        assert spec.horizon is not None  # refused
        return spec.horizon + 1

    # ------------------------------------------------------------ learning

    def loss(self, batch: Batch) -> Losses:
        """Return the loss of the Cloze test."""
        hidden_BT = self.hidden(batch.valid)
        x_BSD, visible_BS = self._gapped(batch, hidden_BT)
        h_BSD = self.answer(self.backbone(x_BSD, self.backbone.keys_values(x_BSD), visible_BS=visible_BS))
        target_BT = batch.required_target.masked_fill(~hidden_BT, NO_ACTION)
        return {"cloze": masked_sum(self.head.nll(h_BSD[:, 1:], target_BT, batch.allowed), hidden_BT)}

    def hidden(self, valid_BT: Tensor) -> Tensor:
        """Return a mask (B, T) of the steps with a loss, whose next position is masked; depends only on the seed."""
        streams, steps = valid_BT.shape
        ids_B = self.sampling_seed + torch.arange(streams, device=valid_BT.device)
        draw_BS = uniform(0, "bert4rec.cloze", ids_B, steps + 1)
        some_BT = (draw_BS[:, 1:] < self.config.mask_share) & (draw_BS[:, :1] >= self.config.last_share)
        return valid_BT & (some_BT | self._last(valid_BT))

    def final(self, batch: Batch) -> Tensor:
        """Return h (B, D) of the last decision, by one pass in which only the last position is a mask."""
        x_BSD, visible_BS = self._gapped(batch, self._last(batch.valid))
        kv_BSF = self.backbone.keys_values(x_BSD)
        return self.answer(self.backbone(x_BSD, kv_BSF, visible_BS=visible_BS, asked_B=batch.valid.sum(1)))

    def _last(self, valid_BT: Tensor) -> Tensor:
        """Return (B, T), True at the last real step."""
        follows_BT = torch.cat([valid_BT[:, 1:], torch.zeros_like(valid_BT[:, :1])], dim=1)
        return valid_BT & ~follows_BT

    def _gapped(self, batch: Batch, hidden_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (B, T + 1, D) with masks in the positions after hidden steps, and which tokens are real."""
        first_B1 = torch.ones_like(hidden_BT[:, :1])
        e_BSD = nn.functional.pad(self.head.embed(batch.obs), (0, 0, 0, 1))
        mask_BS1 = torch.cat([~first_B1, hidden_BT], dim=1)[..., None]
        x_BSD = self._placed(torch.where(mask_BS1, self.mask_D, e_BSD), slice(0, self._check(hidden_BT.shape[1]) + 1))
        return x_BSD, torch.cat([first_B1, batch.valid], dim=1)

    # ------------------------------------------------------------ deciding

    def features(self, batch: Batch) -> Tensor:
        """Compute the prefix of every step again, as acting does."""
        steps = self._check(batch.obs.shape[1])
        x_BTD = self._placed(self.head.embed(batch.obs), slice(0, steps))
        mask_BTD = self._placed(self.mask_D, slice(1, steps + 1)).expand_as(x_BTD)
        kv_BTF, mask_kv_BTF = self.backbone.keys_values(x_BTD), self.backbone.keys_values(mask_BTD)
        answers = []
        for t in range(steps):
            x_BSD = torch.cat([x_BTD[:, : t + 1], mask_BTD[:, t : t + 1]], dim=1)
            kv_BSF = torch.cat([kv_BTF[:, : t + 1], mask_kv_BTF[:, t : t + 1]], dim=1)
            asked_B = torch.full((len(x_BSD),), t + 1, device=x_BSD.device)
            answers.append(self.backbone(x_BSD, kv_BSF, asked_B=asked_B))
        return self.answer(torch.stack(answers, dim=1))

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> BERT4RecState:
        self._check(capacity)
        x_BSD = self.places_SD.new_zeros(streams, capacity + 1, self.config.d_model)
        return BERT4RecState(
            x_BSD=x_BSD,
            kv_BSF=x_BSD.repeat(1, 1, 2),
            length_B=torch.zeros(streams, dtype=torch.long, device=x_BSD.device),
        )

    def step(self, state: BERT4RecState, step: Step) -> tuple[Tensor, BERT4RecState]:
        state.length_B.masked_fill_(step.first, 0)
        self._write(state, self.head.embed(step.obs))
        state.length_B += 1
        self._write(state, self.mask_D.expand(len(step.first), -1))
        visible_BS = torch.arange(state.x_BSD.shape[1], device=state.length_B.device) <= state.length_B[:, None]
        h_BD = self.backbone(state.x_BSD, state.kv_BSF, visible_BS=visible_BS, asked_B=state.length_B)
        return self.head.logits(self.answer(h_BD), step.allowed), state

    def _write(self, state: BERT4RecState, e_BD: Tensor) -> None:
        """Write one embedded token of each stream into its next position."""
        x_B1D = self._placed(e_BD, state.length_B)[:, None]
        for kept, value in ((state.x_BSD, x_B1D), (state.kv_BSF, self.backbone.keys_values(x_B1D))):
            kept.scatter_(1, state.length_B[:, None, None].expand_as(value), value.to(kept.dtype))

    def _placed(self, e: Tensor, place: Tensor | slice) -> Tensor:
        return self.drop(self.norm(e + self.places_SD[place]))

    def _check(self, steps: int) -> int:
        """Return `steps`, or raise ValueError if the position table is too short for them."""
        if steps >= len(self.places_SD):
            raise ValueError(
                f"{steps} steps do not fit BERT4Rec's position table, made for a horizon of {self.spec.horizon}"
            )
        return steps
