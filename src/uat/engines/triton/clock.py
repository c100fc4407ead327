"""The clock on a GPU: the inputs of all steps, to the last bit, in one launch (Triton). Slow twin: `Clock.inputs`."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false
from __future__ import annotations

import math
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def fused_inputs(
    obs: Tensor,
    action_BT: Tensor,
    reward_BT: Tensor,
    valid_BT: Tensor,
    *,
    lag: int,
    scale: float,
    none: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return observations (B, T, ...), previous actions and previous rewards, with the dtypes of the arguments.

    Actions are int64 ids, rewards are float32; `none` holds the values of a missing observation and a missing action.
    """
    given = [x.contiguous() for x in (obs, action_BT, reward_BT, valid_BT)]
    outputs = torch.empty_like(given[0]), torch.empty_like(given[1]), torch.empty_like(given[2])
    rows, steps, width = valid_BT.numel(), valid_BT.shape[1], math.prod(obs.shape[2:])
    programs = triton.cdiv(rows, BLOCK) + triton.cdiv(rows * width, BLOCK)
    if programs:
        with torch.cuda.device_of(obs):  # Triton launches on the current device
            cast(Any, _inputs)[(programs,)](
                *given, *outputs, rows, steps, width, lag, float(scale), NO_OBS=none[0], NO_ACTION=none[1], BLOCK=BLOCK
            )
    return outputs


@triton.jit(do_not_specialize=range(12))  # all but constants: compiled once for all sizes
def _inputs(
    obs_ptr,
    action_ptr,
    reward_ptr,
    valid_ptr,
    told_obs_ptr,
    told_action_ptr,
    told_reward_ptr,
    rows: tl.int64,
    T: tl.int32,
    W: tl.int32,
    lag: tl.int64,
    scale: tl.float32,
    NO_OBS: tl.constexpr,
    NO_ACTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shift the feedback. The first programs process actions and rewards, one number per step; the others process
    observations, W numbers per step."""
    program = tl.program_id(0).to(tl.int64)
    of_feedback = tl.cdiv(rows, BLOCK)
    i = tl.arange(0, BLOCK)
    if program < of_feedback:
        start = program * BLOCK
        n = start + i
        t = ((start % T).to(tl.int32) + i) % T
        valid = tl.load(valid_ptr + n, mask=n < rows, other=False)
        action = tl.load(action_ptr + n - 1, mask=valid & (t >= 1), other=NO_ACTION)
        reward = tl.load(reward_ptr + n - lag, mask=valid & (t >= lag), other=0.0)
        tl.store(told_action_ptr + n, action, mask=n < rows)
        tl.store(told_reward_ptr + n, reward * scale, mask=n < rows)
    else:
        start = (program - of_feedback) * BLOCK
        n = start + i
        first = start // W  # 64 bits; within a program 32 bits are enough
        row = first + ((start - first * W).to(tl.int32) + i) // W
        valid = tl.load(valid_ptr + row, mask=row < rows, other=False)
        obs = tl.load(obs_ptr + n, mask=valid, other=NO_OBS)
        tl.store(told_obs_ptr + n, obs, mask=row < rows)
