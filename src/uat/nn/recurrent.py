"""An LSTM over whole episodes or one step at a time, and additive attention over its past states.

Shapes: B rows, T time, S cached steps, I inputs, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LSTMState = tuple[Tensor, Tensor]
"""Hidden state and cell state of each row, both (B, D)."""


class LSTM(nn.Module):
    """LSTM whose state starts at zero in every row."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(d_in, d_out)

    def begin(self, rows: int) -> LSTMState:
        zeros = self.cell.weight_hh.new_zeros(rows, self.cell.hidden_size)
        return zeros, zeros.clone()

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the hidden state (B, T, D) after every step."""
        memory, hidden = self.begin(len(x_BTI)), []
        for x_BI in x_BTI.unbind(1):
            memory = self.step(memory, x_BI)
            hidden.append(memory[0])
        return torch.stack(hidden, dim=1)

    def step(self, memory: LSTMState, x_BI: Tensor) -> LSTMState:
        return self.cell(x_BI, memory)


class AdditiveAttention(nn.Module):
    """Σ_s α_s h_s with α = softmax_s(v · tanh(W h_s + U h_t)) over the past s <= t (Bahdanau et al. 2015)."""

    def __init__(self, d_in: int) -> None:
        super().__init__()
        self.past, self.now = nn.Linear(d_in, d_in), nn.Linear(d_in, d_in, bias=False)
        self.score = nn.Linear(d_in, 1, bias=False)

    def forward(self, h_BTD: Tensor) -> Tensor:
        """Return the attention output (B, T, D) of every step over its past."""
        steps = torch.arange(h_BTD.shape[1], device=h_BTD.device)
        return self.recall(h_BTD, h_BTD, (steps <= steps[:, None]).expand(len(h_BTD), -1, -1))

    def recall(self, past_BSD: Tensor, now_BTD: Tensor, visible_BTS: Tensor) -> Tensor:
        score_BTS = self.score(torch.tanh(self.past(past_BSD)[:, None] + self.now(now_BTD)[:, :, None]))[..., 0]
        return score_BTS.masked_fill(~visible_BTS, -torch.inf).softmax(-1) @ past_BSD
