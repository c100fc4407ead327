"""Measure an endless stream: its memory, its time per step, and its agreement with the parallel pass.

    python benchmarks/endless.py --steps 1000000 --context 256
    python benchmarks/endless.py --steps 1000000 --context 256 --path cached

A small UAT with rotary positions and a window acts in one stream with random observations, actions and rewards. Time
per step is compared in two ways: the median of the first tenth with a full window and that of the last tenth; and at
the end, in alternation, with a new stream, so that load on the machine affects both equally. The parallel pass covers
only the steps on which the compared answers depend, with the same window.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import uat
from uat.methods.uat import UAT, UATConfig
from uat.spec import Spec, Vector, Weights

BLOCK = 1000
"""Number of steps for which random numbers are drawn at a time."""
STRETCH = 64
"""Number of consecutive answers that are compared with the parallel pass."""
FORGET = 128
"""Number of steps after which feedback has no weight in UAT's running average: 0.7^128 is 1e-20."""
SPEC = Spec(obs=Vector(4), action=Weights(3), horizon=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    path: str
    context: int
    steps: int
    first_us: float
    """Median time per step, in microseconds, of the first tenth once the window is full."""
    last_us: float
    """Median time per step, in microseconds, of the last tenth."""
    ratio_to_young: float
    """Time per step of the old stream divided by that of a new one, measured in alternation at the end."""
    first_rss_mb: float
    last_rss_mb: float
    """Memory of the process after the first tenth, and at the end."""
    first_state_bytes: int
    last_state_bytes: int
    """Size of the pickled session at the same moments."""
    compared: int
    largest_difference: float
    """Largest difference between answers of the stream and of the parallel pass, both in double precision."""


class Told:
    """Inputs of the stream, which depend only on the step."""

    def __init__(self, seed: int) -> None:
        self.seed, self.block, self.rows = seed, -1, torch.empty(0)

    def __getitem__(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """The observation, and the action and reward of step t."""
        if t // BLOCK != self.block:
            self.block = t // BLOCK
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.block)
            self.rows = torch.randn(BLOCK, SPEC.action.count + 5, generator=generator)
        row = self.rows[t % BLOCK]
        return row[None, :4], row[None, 5:].softmax(-1), row[None, 4]


def build(context: int) -> UAT:
    """A policy with random weights and open gates."""
    torch.manual_seed(0)
    config = UATConfig(d_model=16, num_heads=2, num_layers=2, d_ff=32, positions="rotary", context=context)
    policy = UAT(SPEC, config).double().eval()
    for readout in (policy.utility.token, policy.utility.regime):
        torch.nn.init.normal_(readout.weight, std=0.5)
    return policy


class Stream:
    """A session with its number of steps and its latest inputs."""

    def __init__(self, policy: UAT, path: Literal["fast", "cached"], remember: int, seed: int = 0) -> None:
        self.session, self.told, self.t = uat.Session(policy, path=path), Told(seed), 0
        self.recent: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=remember)
        self.answers: deque[Tensor] = deque(maxlen=STRETCH)
        pickle.dumps(self.session)  # Python reads attributes 2 % slower from then on: all streams alike, from the start

    def advance(self) -> float:
        """Act once; return the seconds that it took."""
        obs, action, reward = self.told[self.t]
        feedback = {"action": self.recent[-1][1], "reward": self.recent[-1][2]} if self.t else {}
        begin = time.perf_counter()
        answer = self.session.act(obs, **feedback)
        seconds = time.perf_counter() - begin
        self.recent.append((obs, action, reward))
        self.answers.append(answer)
        self.t += 1
        return seconds

    @torch.no_grad()
    def difference(self, policy: UAT) -> float:
        """Largest difference between the last answers and the parallel pass over the steps on which they depend."""
        obs, action, reward = (torch.stack(part, dim=1) for part in zip(*self.recent, strict=True))
        batch = SPEC.clock.batch(uat.episodes(SPEC, obs=obs, action=action, reward=reward))
        expected = policy.logits(batch)[0, -STRETCH:].softmax(-1)
        return float((torch.cat(list(self.answers)) - expected).abs().max())


def resident_mb() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(steps: int, context: int, path: Literal["fast", "cached"], samples: int = 20) -> Result:
    policy = build(context)
    remember = STRETCH + (policy.backbone.reach or 0) + FORGET
    stream, tenth = Stream(policy, path, remember), steps // 10
    if tenth <= max(context, STRETCH):
        raise ValueError(f"--steps {steps} must be more than ten times the context of {context}, and {10 * STRETCH}")
    first, last = array("d"), array("d")
    differences, sizes, rss = [], [], []
    for t in range(1, steps + 1):
        seconds = stream.advance()
        if context < t <= tenth:
            first.append(seconds)
        elif t > steps - tenth:
            last.append(seconds)
        if t % (steps // samples) == 0:
            differences.append(stream.difference(policy))
        if t in (tenth, steps):
            sizes.append(len(pickle.dumps(stream.session)))
            rss.append(resident_mb())
    return Result(
        path=path,
        context=context,
        steps=steps,
        first_us=1e6 * statistics.median(first),
        last_us=1e6 * statistics.median(last),
        ratio_to_young=in_turns(stream, Stream(policy, path, remember, seed=1), context),
        first_rss_mb=rss[0],
        last_rss_mb=rss[1],
        first_state_bytes=sizes[0],
        last_state_bytes=sizes[1],
        compared=STRETCH * len(differences),
        largest_difference=max(differences),
    )


def in_turns(old: Stream, young: Stream, context: int, turns: int = 40, steps: int = 100) -> float:
    """Median over turns of the old stream's time per step divided by the new one's."""
    for _ in range(context):
        young.advance()
    ratios = []
    for turn in range(turns):
        pair = (old, young) if turn % 2 else (young, old)
        medians = {id(each): statistics.median(each.advance() for _ in range(steps)) for each in pair}
        ratios.append(medians[id(old)] / medians[id(young)])
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the stream")
    parser.add_argument("--context", type=int, default=256, help="remembered steps")
    parser.add_argument("--path", choices=("fast", "cached"), default="fast", help="the session's step")
    options = parser.parse_args()
    print(json.dumps(asdict(measure(options.steps, options.context, options.path)), indent=2))


if __name__ == "__main__":
    main()
