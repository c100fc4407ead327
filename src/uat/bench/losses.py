"""The loss over many items: with whole logits, and some rows of them at a time (`uat.nn.vocabulary`).

Shapes: R rows, D width, A items.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from uat.nn.vocabulary import linear_cross_entropy

PATHS = ("whole", "pieces")
WIDTH = 64
"""The paper's width of the residual stream in recommendation."""
COPIES = 4
"""Tables as large as the logits that the plain loss may hold at one time: logits, log-probabilities, two gradients."""


class Loss:
    """Forwards and backwards over random rows; nothing is kept from call to call but the inputs."""

    def __init__(self, path: str, rows: int, items: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.path = path
        self.h_RD, self.weight_AD = (torch.randn(n, WIDTH, generator=generator).to(device) for n in (rows, items))
        self.bias_A = torch.zeros(items, device=device)
        self.target_R = torch.randint(items, (rows,), generator=generator).to(device)
        self.inputs = [x.requires_grad_() for x in (self.h_RD, self.weight_AD, self.bias_A)]

    def run(self) -> tuple[Tensor, ...]:
        """The gradients."""
        if self.path == "whole":
            loss = F.cross_entropy(F.linear(self.h_RD, self.weight_AD, self.bias_A), self.target_R)
        else:
            loss = linear_cross_entropy(self.h_RD, self.weight_AD, self.bias_A, self.target_R).mean()
        return torch.autograd.grad(loss, self.inputs)


def unfit(path: str, rows: int, items: int, device: torch.device) -> str | None:
    """Why a path is not tried: its logits would not fit the memory that is free."""
    needed = COPIES * 4 * rows * items
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free()
    if path != "whole" or needed < free:
        return None
    return f"whole logits of {rows} rows may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


def peak(loss: Loss, device: torch.device) -> float | None:
    """Most memory of one call above its inputs, MiB; None on a CPU, where torch tells none."""
    if device.type != "cuda":
        return None
    loss.run()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss.run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _free() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
