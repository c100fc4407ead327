"""Plot one test episode: the patient's state, the treatment, and the hidden regime.

python -m uat.paper.draw_sepsis docs/domains/sepsis-episode.png [EPISODE]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from uat.acting import rollout
from uat.domains.domain import split_seed
from uat.domains.sepsis.domain import Sepsis
from uat.domains.sepsis.treatment import REGIMES
from uat.domains.sepsis.world import SepsisConfig
from uat.episode import Trajectory
from uat.files import replacing

COLOURS = ("#56B4E9", "#E69F00", "#009E73")
"""Okabe and Ito's palette, one colour per regime."""
LINES = {"SOFA": "#000000", "lactate": "#D55E00", "MAP": "#0072B2"}


def example(episode: int) -> Trajectory:
    """A test episode as played by the filter that knows the segment lengths."""
    domain = Sepsis(SepsisConfig())
    simulator = domain.simulator("test", "cpu")
    return rollout(
        domain.references()["ceiling"], simulator, simulator.noise(torch.tensor([episode]), split_seed("test", 0))
    )


def draw(trajectory: Trajectory, file: Path) -> None:
    """Plot the first episode of a trajectory."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the drawing needs matplotlib, which is not installed: pip install 'uat-transformer[bench]'")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 6.5), layout="constrained")
    patches = importlib.import_module("matplotlib.patches")
    state_axes, action_axes, reward_axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1.4])
    steps = int(trajectory.valid[0].sum())
    t = list(range(steps))
    regime_T = trajectory.facts["regime"][0, :steps]
    for axes in (state_axes, action_axes, reward_axes):
        _shade(axes, regime_T.tolist())
        axes.spines[["top", "right"]].set_visible(False)
    for i, (name, colour) in enumerate(LINES.items()):
        state_axes.plot(t, trajectory.facts["state"][0, :steps, i], color=colour, label=name)
    state_axes.set_ylim(0, 1)
    state_axes.set_ylabel("state on [0, 1]")
    bands = [patches.Patch(color=c, alpha=0.3, label=name) for c, name in zip(COLOURS, REGIMES, strict=True)]
    lines, _ = state_axes.get_legend_handles_labels()
    state_axes.legend(
        handles=[*lines, *bands], ncols=6, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    action_T, target_T = trajectory.action[0, :steps], trajectory.required_target[0, :steps]
    action_axes.step(t, target_T, where="mid", color="#999999", linewidth=3, label="expert, who sees the regime")
    for right, marker, colour in ((True, "o", "#000000"), (False, "x", "#D55E00")):
        chosen = [i for i in t if (action_T[i] == target_T[i]).item() is right]
        label = "filter, as the expert" if right else "filter, otherwise"
        action_axes.plot(chosen, action_T[chosen], marker, color=colour, markersize=4, label=label)
    action_axes.set_yticks(range(5))
    action_axes.set_ylim(-0.5, 5.4)
    action_axes.set_ylabel("action (intensity)")
    action_axes.legend(ncols=3, frameon=False, fontsize=8, loc="upper center")
    reward_axes.bar(t, trajectory.reward[0, :steps], color="#444444", width=0.8)
    reward_axes.set_ylabel("reward")
    reward_axes.set_xlabel("step")
    reward_axes.set_xlim(-0.5, steps - 0.5)
    with replacing(file) as image:
        figure.savefig(image, format=file.suffix.removeprefix(".") or None, dpi=130)


def _shade(axes: Any, regimes: list[int]) -> None:
    """Shade every segment in the colour of its regime."""
    begin = 0
    for t in range(1, len(regimes) + 1):
        if t == len(regimes) or regimes[t] != regimes[begin]:
            axes.axvspan(begin - 0.5, t - 0.5, color=COLOURS[regimes[begin]], alpha=0.2, linewidth=0)
            begin = t


if __name__ == "__main__":
    draw(example(int(sys.argv[2]) if len(sys.argv) > 2 else 0), Path(sys.argv[1]))
