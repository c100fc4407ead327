"""Gradient clipping and a step of Adam for many small tensors, in two launches (Triton).

Torch's kernel gives each program 64 thousand numbers, and a small network has hardly more. Here each program has a
chunk of one tensor. The first launch sums the squares of each chunk and counts the step. In the second, every program
sums all chunk sums in the same order and updates its chunk. Gradients in memory are not changed.

Tuples passed to a kernel have one entry per tensor. Chunks are numbered across all tensors.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.engines.triton.complete_weights import power_of_two
from uat.engines.triton.parts import shares

CHUNK = 1024
"""Numbers per program."""
MOST = 80
"""Most tensors per launch: the arguments of a kernel are limited to 4096 bytes."""
MOST_NUMBERS = 1 << 22
"""Most numbers of all tensors. Beyond this torch's kernel is better: programs here would read too many chunk sums."""
MOST_PARTS = 1024
"""Chunk sums that a program reads at a time."""


class Learnt(NamedTuple):
    """A parameter with a gradient, its Adam state, and the settings of its group."""

    p: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    rate: Tensor
    decay: float


def learnt(optimizer: torch.optim.Optimizer) -> list[Learnt]:
    """Return the parameters that a step changes; those without a gradient are skipped."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                state = optimizer.state[p]
                kept = (state["exp_avg"], state["exp_avg_sq"], state["step"])
                found.append(Learnt(p, p.grad, *kept, group["lr"], group["weight_decay"]))
    return found


def fits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is plain Adam, with contiguous float32 tensors on one device."""
    groups = optimizer.param_groups
    moving = [p for group in groups for p in group["params"] if p.grad is not None]
    if type(optimizer) is not torch.optim.Adam or not moving or any(not optimizer.state[p] for p in moving):
        return False
    if any(group[name] for group in groups for name in ("amsgrad", "maximize", "decoupled_weight_decay")):
        return False
    if len({(*group["betas"], group["eps"]) for group in groups}) > 1 or min(groups[0]["betas"]) == 0:
        return False
    if not all(isinstance(group["lr"], Tensor) for group in groups):
        return False
    tensors = [tensor for one in learnt(optimizer) for tensor in one[:6]]
    plain = all(t.layout == torch.strided and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    sizes = [p.numel() for p in moving]
    return plain and len({t.device for t in tensors}) == 1 and min(sizes) > 0 and sum(sizes) <= MOST_NUMBERS


def fused_adam(optimizer: torch.optim.Optimizer, clip: float) -> Tensor:
    """Take a step of a supported optimizer (see `fits`) with the gradient clipped as by `clip_grad_norm_`; return the
    gradient's norm () before clipping."""
    moving, group = learnt(optimizer), optimizer.param_groups[0]
    counts = [shares(one.p.numel(), CHUNK) for one in moving]
    parts, norm = moving[0].p.new_empty(sum(counts)), moving[0].p.new_empty(())
    launches, first = [], 0
    for at in range(0, len(moving), MOST):
        some, (*starts, programs) = moving[at : at + MOST], accumulate(counts[at : at + MOST], initial=0)
        places = {"STARTS": tuple(starts), "SIZES": tuple(one.p.numel() for one in some), "CHUNK": CHUNK}
        launches.append((some, programs, places))
        gradients, steps = tuple(one.gradient for one in some), tuple(one.step for one in some)
        cast(Any, _squares)[(programs,)](gradients, steps, parts[first:], **places)
        first += programs
    for some, programs, places in launches:
        *tensors, decays = zip(*some, strict=True)
        cast(Any, _adam)[(programs,)](
            *tensors, parts, norm, float(clip), DECAYS=decays, **places,
            BETA1=group["betas"][0], BETA2=group["betas"][1], EPS=group["eps"],
            LOG1=math.log(group["betas"][0]), LOG2=math.log(group["betas"][1]),
            PARTS=len(parts), BLOCK=min(MOST_PARTS, power_of_two(len(parts))),
        )  # fmt: skip
    return norm


@triton.jit
def _chosen(entries, program, STARTS: tl.constexpr):
    """Select the entry of the tensor whose chunk the program processes."""
    found = entries[0]
    for i in tl.static_range(1, len(entries)):
        found = tl.where(program >= STARTS[i], entries[i], found)
    return found


@triton.jit
def _within(program, STARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the offsets of a chunk in its tensor. The threads of a warp read neighbouring numbers; tensors of any
    length rule out wider loads per thread."""
    return tl.max_contiguous((program - _chosen(STARTS, program, STARTS)) * CHUNK + tl.arange(0, CHUNK), 1)


@triton.jit
def _squares(gradients, steps, parts_ptr, STARTS: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    i = _within(program, STARTS, CHUNK)
    g = tl.load(_chosen(gradients, program, STARTS) + i, mask=i < _chosen(SIZES, program, STARTS), other=0.0)
    tl.store(parts_ptr + program, tl.sum(g * g, 0))
    if program == _chosen(STARTS, program, STARTS):
        step_ptr = _chosen(steps, program, STARTS)
        tl.store(step_ptr, tl.load(step_ptr) + 1)


@triton.jit
def _adam(
    ps, gradients, means, squares, steps, rates, parts_ptr, norm_ptr, clip,
    DECAYS: tl.constexpr, STARTS: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = _within(program, STARTS, CHUNK)
    live = i < _chosen(SIZES, program, STARTS)
    p_ptr = _chosen(ps, program, STARTS) + i
    mean_ptr = _chosen(means, program, STARTS) + i
    square_ptr = _chosen(squares, program, STARTS) + i
    g = tl.load(_chosen(gradients, program, STARTS) + i, mask=live, other=0.0)
    p = tl.load(p_ptr, mask=live, other=0.0)
    mean = tl.load(mean_ptr, mask=live, other=0.0)
    square = tl.load(square_ptr, mask=live, other=0.0)
    rate = tl.load(_chosen(rates, program, STARTS))
    step = tl.load(_chosen(steps, program, STARTS)).to(tl.float64)

    n = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in tl.range(0, PARTS, BLOCK):
        total += tl.load(parts_ptr + at + n, mask=at + n < PARTS, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total, 0))
    if program == 0:
        tl.store(norm_ptr, norm)
    small = tl.div_rn(clip, norm + 1e-6)
    g *= tl.where(small > 1.0, 1.0, small)  # NaN stays NaN

    g += p * _chosen(DECAYS, program, STARTS)
    mean = mean * BETA1 + g * (1 - BETA1)
    square = square * BETA2 + g * g * (1 - BETA2)
    # 1 - beta^step starts at about 0.001: computed in float32 it would lose most of its digits
    stride = (rate / (1 - tl.exp(step * LOG1))).to(tl.float32)
    root = tl.sqrt_rn((1 - tl.exp(step * LOG2)).to(tl.float32))
    p -= tl.div_rn(stride * mean, tl.div_rn(tl.sqrt_rn(square), root) + EPS)
    tl.store(p_ptr, p, mask=live)
    tl.store(mean_ptr, mean, mask=live)
    tl.store(square_ptr, square, mask=live)
