"""Benchmark of the loss over many items: with all logits at once, and in blocks of rows (`uat.nn.vocabulary`).

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
"""Tensors of the size of the logits that the plain loss holds at once: logits, log-probabilities, two gradients."""


class Loss:
    """Forward and backward pass over random rows. Only the inputs are kept between calls."""

    def __init__(self, path: str, rows: int, items: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.path = path
        self.h_RD, self.weight_AD = (torch.randn(n, WIDTH, generator=generator).to(device) for n in (rows, items))
        self.bias_A = torch.zeros(items, device=device)
        self.target_R = torch.randint(items, (rows,), generator=generator).to(device)
        self.inputs = [x.requires_grad_() for x in (self.h_RD, self.weight_AD, self.bias_A)]

    def run(self) -> tuple[Tensor, ...]:
        """Compute the loss and return its gradients."""
        if self.path == "whole":
            loss = F.cross_entropy(F.linear(self.h_RD, self.weight_AD, self.bias_A), self.target_R)
        else:
            loss = linear_cross_entropy(self.h_RD, self.weight_AD, self.bias_A, self.target_R).mean()
        return torch.autograd.grad(loss, self.inputs)


def unsupported_reason(path: str, rows: int, items: int, device: torch.device) -> str | None:
    """Why a path is not measured: its logits would not fit in the free memory. None if they fit."""
    needed = COPIES * 4 * rows * items
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free()
    if path != "whole" or needed < free:
        return None
    return f"whole logits of {rows} rows may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


def peak(loss: Loss, device: torch.device) -> float | None:
    """Peak memory of one call in MiB, without its inputs; None on a CPU, where torch does not report it."""
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
