"""`uat demo`: train Vanilla and UAT on DarkRoom, and write a page that compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from uat import __version__
from uat.domains import split_seed
from uat.engines.rollout import RolloutRunner
from uat.episode import Trajectory
from uat.evaluation.scores import CEILING, EXPERT, RANDOM, Evaluation, evaluate, gap_closed
from uat.manifest import manifest
from uat.methods import Policy
from uat.paper.page import write_page
from uat.recipes import recipe
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device
from uat.training.trainer import ShowProgress, train

LABELS = {"uat": "UAT", "vanilla": "Vanilla", CEILING: "Bayes filter", EXPERT: "Expert", RANDOM: "Random"}
COMPARED = ("vanilla", "uat")
SHOWN_EPISODES = 3


def demo(
    out: Path,
    *,
    preset: Literal["smoke", "quick", "paper"] = "quick",
    seed: int = 0,
    device: torch.device | str | None = None,
    threads: int | None = None,
    progress: ShowProgress | None = None,
) -> tuple[list[dict[str, Any]], Path]:
    """Train both methods, or resume their runs, score them and write the page; return its table and its path.

    threads: CPU threads; by default UAT_THREADS, or one.
    """
    with cpu_threads(threads):
        return _demo(out, preset, seed, device, progress)


def _demo(
    out: Path, preset: str, seed: int, device: torch.device | str | None, progress: ShowProgress | None
) -> tuple[list[dict[str, Any]], Path]:
    runs, seconds = {}, {}
    for method in COMPARED:
        config = recipe("darkroom", method, preset, seed=seed)
        runs[method] = train(config, out / method, resume=(out / method).exists(), device=device, progress=progress)
        seconds[method] = sum(row["seconds"] for row in runs[method].rows("timing.jsonl"))
    evaluations = {method: evaluate(run, references=method == "uat", device=device) for method, run in runs.items()}
    rows = table(evaluations, runs, seconds)
    page = out / "demo.html"
    write_page(page_data(rows, runs, pick_device(device)), page)
    return rows, page


def table(evaluations: dict[str, Evaluation], runs: dict[str, Run], seconds: dict[str, float]) -> list[dict[str, Any]]:
    """One row per method and reference, ordered by the information that each has."""
    values = {name: {s.metric: s.value for s in one.scores if s.method == name} for name, one in evaluations.items()}
    references = evaluations["uat"]
    values |= {
        name: {s.metric: s.value for s in references.scores if s.method == name} for name in (CEILING, EXPERT, RANDOM)
    }
    blind, ceiling = values["vanilla"]["accuracy"], values[CEILING]["accuracy"]
    rows = []
    for method in (RANDOM, *COMPARED, CEILING, EXPERT):
        low, high = evaluations.get(method, references).interval(method, "accuracy")
        trained = method in COMPARED
        row = {
            "method": method,
            "label": LABELS[method],
            "accuracy": values[method]["accuracy"],
            "low": low,
            "high": high,
        }
        row["optimal_accuracy"], row["efficiency"] = values[method]["optimal_accuracy"], values[method]["efficiency"]
        row["gap_closed"] = gap_closed(values[method]["accuracy"], blind, ceiling) if trained else None
        row["parameters"] = sum(p.numel() for p in load_policy(runs[method].path).parameters()) if trained else None
        row["seconds"] = round(seconds[method], 1) if trained else None
        rows.append(row)
    return rows


def page_data(rows: list[dict[str, Any]], runs: dict[str, Run], device: torch.device) -> dict[str, Any]:
    """Data of the page; page.py describes its shape."""
    domain, count = runs["uat"].config.build_domain(), torch.get_num_threads()
    cpu = f"CPU, {count} thread{'' if count == 1 else 's'}"
    return {
        "title": "Does feedback reshape attention?",
        "subtitle": headline({row["method"]: row["accuracy"] for row in rows}),
        "command": f"uat demo --preset {runs['uat'].config.preset} --seed {runs['uat'].config.seed}",
        "device": manifest(device)["device"] if device.type == "cuda" else cpu,
        "version": __version__,
        "task": domain.task,
        "table": rows,
        "curves": {method: [_point(row) for row in run.rows("metrics.jsonl")] for method, run in runs.items()},
        "grid": domain.config.size,
        "actions": ["stay", "up", "down", "left", "right"],
        "episodes": episodes({method: load_policy(run.path) for method, run in runs.items()}, domain),
    }


def headline(accuracy: dict[str, float]) -> str:
    return (
        f"UAT decides as the expert does in {accuracy['uat']:.1%} of steps, Vanilla in {accuracy['vanilla']:.1%}, "
        f"the Bayes filter in {accuracy[CEILING]:.1%}."
    )


def _point(row: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": row["epoch"], "loss": row["loss/imitation"], "accuracy": row.get("validation/accuracy")}


def episodes(policies: dict[str, Policy], domain: Any) -> list[dict[str, Any]]:
    """The first test episodes as played by each policy, with its attention."""
    shown: list[dict[str, Any]] = [{"name": f"test episode {i + 1}", "policies": {}} for i in range(SHOWN_EPISODES)]
    for method, policy in policies.items():
        player = RolloutRunner(policy, domain.simulator("test", "cpu"), device=torch.device("cpu"), sampled=False)
        trajectory = player.play(torch.arange(SHOWN_EPISODES), split_seed("test", 0))
        attention_LBTT, gates = look_inside(policy, trajectory)
        for i, episode in enumerate(shown):
            episode["policies"][method] = {
                **{name: trajectory.facts[name][i].tolist() for name in ("position", "goal")},
                **{name: getattr(trajectory, name)[i].tolist() for name in ("action", "target")},
                "reward": _rounded(trajectory.reward[i]),
                "cue": trajectory.obs[i, :, -1].int().tolist(),
                "attention": _rounded(attention_LBTT[:, i]),
                "gates": {name: _rounded(norm[i]) for name, norm in gates.items()} if gates else None,
            }
    return shown


@torch.no_grad()
def look_inside(policy: Policy, trajectory: Trajectory) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Attention (L, B, T, T), mean over heads, and the norms of the gates: rho (B, T) and g (B, L, T)."""
    trace = policy.trace(policy.spec.clock.batch(trajectory))
    if trace.gates is None:
        return trace.attention_LBHTT.mean(2), None
    g_BLT = trace.gates.known_LBTD.norm(dim=-1).transpose(0, 1)
    return trace.attention_LBHTT.mean(2), {"rho": trace.gates.rho.norm(dim=-1), "g": g_BLT}


def _rounded(x: Tensor) -> Any:
    return torch.round(x.double(), decimals=3).tolist()
