"""The standard task of sequential recommenders: predict the next item, with leave-one-out splits and full ranking.

It checks the quality of a recommender on a task with published results (docs/next_item.md). The last item of each user
is for testing, the one before it for validation, and the rest for training. Items that the user has already seen are
excluded from the ranking. Any policy whose observations and actions are items can be evaluated.

Axes: U users, N interactions, T time, I items, B users of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.archives import read_arrays, required, write_arrays
from uat.clock import NO_ACTION
from uat.config import Precision, TrainConfig
from uat.domains.movielens.ranking import Ranking
from uat.engines import Engine
from uat.engines.graph import captured_or_none
from uat.engines.update import optimize
from uat.episode import Batch, TensorFields
from uat.files import FileError
from uat.methods import METHODS, Policy
from uat.metrics import Score
from uat.noise import derive, uniform
from uat.settings import Count, Epochs, Scale, Seed, Steps, check_fields
from uat.spec import Discrete, Items, Spec
from uat.threads import cpu_threads
from uat.training.optimizing import build_optimizer
from uat.training.surroundings import precision, seeded

Array = Any
USERS_AT_ONCE = 1024
"""Number of users per ranking batch."""


# ---------------------------------------------------------------- sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Interactions of each user in order of time, user by user."""

    item_N: Array
    """Items 0 .. count - 1."""
    first_U: Array
    """Index of each user's first interaction, followed by the total number."""

    @classmethod
    def of(cls, user_N: Array, item_N: Array, time_N: Array, *, least: int = 5) -> Sequences:
        """Keep users and items with at least `least` interactions, counted before filtering, and sort by time.

        Simultaneous interactions keep their order.
        """
        enough = [np.bincount(ids_N)[ids_N] >= least for ids_N in (user_N, item_N)]
        kept_N = np.flatnonzero(enough[0] & enough[1])
        order_N = kept_N[np.lexsort((time_N[kept_N], user_N[kept_N]))]
        _, item_N = np.unique(item_N[order_N], return_inverse=True)
        _, counts_U = np.unique(user_N[order_N], return_counts=True)
        return cls(item_N=item_N.astype(np.int32), first_U=np.concatenate([[0], counts_U.cumsum()]))

    def __post_init__(self) -> None:
        if len(self.first_U) < 2 or np.diff(self.first_U).min() < 4:
            raise ValueError(
                "every user needs at least 4 interactions: two for training, one for validation, one for testing"
            )

    @property
    def num_items(self) -> int:
        return int(self.item_N.max()) + 1

    @property
    def num_users(self) -> int:
        return len(self.first_U) - 1

    def save(self, path: Path) -> None:
        write_arrays(path, {"item_N": self.item_N, "first_U": self.first_U})

    @classmethod
    def load(cls, path: Path) -> Sequences:
        arrays = read_arrays(path)
        item_N, first_U = (required(path, arrays, name, "i", (None,)) for name in ("item_N", "first_U"))
        if len(first_U) < 2 or first_U[0] != 0 or first_U[-1] != len(item_N) or (np.diff(first_U) < 0).any():
            raise FileError(f"{path}: first_U does not divide the {len(item_N)} entries of item_N among users")
        if len(item_N) and item_N.min() < 0:
            raise FileError(f"{path}: item_N has negative items")
        try:
            return cls(item_N=item_N, first_U=first_U)
        except ValueError as error:
            raise FileError(f"{path}: {error}") from None


@dataclass(slots=True, kw_only=True)
class Questions(TensorFields):
    """Prediction tasks: the last items of each user, the next item, and all items seen before."""

    obs_UT: Tensor
    target_U: Tensor
    seen_UI: Tensor

    def rows(self, rows: slice) -> Questions:
        return self.map(lambda value: value[rows])


@dataclass(slots=True, kw_only=True)
class LeaveOneOut(TensorFields):
    """Sequences as tables: the newest steps of each user, padded at the end with -1."""

    obs_UT: Tensor
    """Input items for training."""
    target_UT: Tensor
    """The item that follows each input item."""
    validation: Questions
    test: Questions

    @classmethod
    def of(cls, sequences: Sequences, length: int) -> LeaveOneOut:
        item_N = torch.from_numpy(sequences.item_N).long()
        first_U, end_U = (torch.from_numpy(x).long() for x in (sequences.first_U[:-1], sequences.first_U[1:]))
        user_N = torch.repeat_interleave(end_U - first_U)

        def newest(until_U: Tensor, ahead: int = 0) -> Tensor:
            """The last items before an index in each user's sequence, shifted by `ahead`."""
            place_UT = torch.maximum(first_U, until_U - length)[:, None] + torch.arange(length)
            item_UT = item_N[(place_UT + ahead).clamp_max(len(item_N) - 1)]
            return item_UT.masked_fill(place_UT >= until_U[:, None], NO_ACTION)

        def asked(place_U: Tensor) -> Questions:
            before_N = torch.arange(len(item_N)) < place_U[user_N]
            seen_UI = torch.zeros(sequences.num_users, sequences.num_items, dtype=torch.bool)
            seen_UI[user_N[before_N], item_N[before_N]] = True
            return Questions(obs_UT=newest(place_U), target_U=item_N[place_U], seen_UI=seen_UI)

        return cls(
            obs_UT=newest(end_U - 3),
            target_UT=newest(end_U - 3, ahead=1),
            validation=asked(end_U - 2),
            test=asked(end_U - 1),
        )


def next_item_spec(num_items: int, length: int) -> Spec:
    """The task as a decision problem, with items as observations and actions."""
    return Spec(obs=Items(num_items), action=Discrete(num_items), horizon=length)


def as_batch(obs_BT: Tensor, target_BT: Tensor | None = None) -> Batch:
    """A batch without feedback."""
    none_BT = torch.full_like(obs_BT, NO_ACTION)
    return Batch(
        obs=obs_BT,
        prev_action=none_BT,
        prev_reward=torch.zeros_like(obs_BT, dtype=torch.float32),
        target=none_BT if target_BT is None else target_BT,
        valid=obs_BT >= 0,
    )


# ---------------------------------------------------------------- ranking


def rank(score_BI: Tensor, target_B: Tensor, seen_BI: Tensor) -> dict[str, Tensor]:
    """Each metric (B,) of the target's rank among all unseen items; ties count as in random order."""
    score_BI = score_BI.float().masked_fill(seen_BI, -math.inf)
    own_B1 = score_BI.gather(1, target_B[:, None])
    above_B = (score_BI > own_B1).sum(1)
    ranking = Ranking.full(score_BI.shape[1]).to(score_BI.device)
    return ranking.between(above_B, above_B + (score_BI == own_B1).sum(1))


@torch.no_grad()
def score_questions(policy: Policy, questions: Questions) -> dict[str, float]:
    """Mean of each metric over all users."""
    policy.eval()
    parts = []
    for begin in range(0, len(questions.target_U), USERS_AT_ONCE):
        some = questions.rows(slice(begin, begin + USERS_AT_ONCE))
        score_BI = policy.read(as_batch(some.obs_UT)).every(slice(None))
        parts.append(rank(score_BI, some.target_U, some.seen_UI))
    return {name: torch.cat([part[name] for part in parts]).mean().item() for name in parts[0]}


# ---------------------------------------------------------------- learning


@dataclass(frozen=True, slots=True, kw_only=True)
class NextItemConfig:
    length: Steps = 200
    """Number of a user's newest items in the input."""
    batch_size: Count = 128
    """Users per optimizer step."""
    lr: Scale = 1e-3
    """Adam's learning rate."""
    epochs: Epochs = 100
    """Maximum number of passes over all users."""
    patience: Epochs = 10
    """Number of passes without a better validation NDCG@10 after which training stops."""
    precision: Precision = "tf32"
    """Arithmetic, as in training."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a training: metrics at the pass with the best validation."""

    validation: dict[str, float]
    test: dict[str, float]
    best_epoch: int
    epochs: int
    seconds: float

    def rows(self, method: str, dataset: str, seed: int, users: int) -> list[Score]:
        """All metrics as rows, including the training time."""
        place = {"run": "", "method": method, "domain": "next-item", "task": dataset, "setting": "leave-one-out"}
        spent = {"best_epoch": float(self.best_epoch), "epochs": float(self.epochs), "seconds": self.seconds}
        parts = {"validation": self.validation, "test": self.test, "train": spent}
        return [
            Score(**place, split=split, seed=seed, metric=metric, value=value, n=users)
            for split, metrics in parts.items()
            for metric, value in metrics.items()
        ]


class Learner:
    """A policy and its optimizer step, with all data on the device."""

    def __init__(self, policy: Policy, data: LeaveOneOut, config: NextItemConfig) -> None:
        self.policy, self.data, self.config = policy, data, config
        self.engine, self.phase = Engine(policy), policy.phases()[0]
        self.optimizer = build_optimizer(policy, TrainConfig(lr=config.lr, weight_decay=0.0))
        self.row_B = torch.full((config.batch_size,), -1, device=data.obs_UT.device)
        """Users of the batch, padded with -1."""
        self.step: Callable[[], dict[str, Tensor]] = self.plain_step

    def capture(self) -> None:
        """Capture the whole step as one CUDA graph, if possible."""
        state = [tensor for one in self.optimizer.state.values() for tensor in one.values()]
        self.row_B.copy_(torch.arange(len(self.row_B)))
        captured = captured_or_none(self.plain_step, "the step", preserve=[*self.policy.parameters(), *state])
        self.step = captured or self.plain_step

    def plain_step(self) -> dict[str, Tensor]:
        real_B1 = (self.row_B >= 0)[:, None]
        row_B = self.row_B.clamp(0, len(self.data.obs_UT) - 1)
        obs_BT, target_BT = (x[row_B].masked_fill(~real_B1, NO_ACTION) for x in (self.data.obs_UT, self.data.target_UT))
        with self.engine.learning():
            return optimize(self.phase, as_batch(obs_BT, target_BT), self.optimizer, math.inf)

    def epoch(self, index: int) -> float:
        """Train on all users once, in a new random order; return the mean loss."""
        losses, users, seed = [], len(self.data.obs_UT), self.config.seed
        share_1U = uniform(seed, "next-item.order", torch.tensor([index], device=self.row_B.device), users)
        for number, row_B in enumerate(share_1U[0].argsort().split(len(self.row_B))):
            self.row_B.fill_(-1)
            self.row_B[: len(row_B)] = row_B
            self.engine.reseed(derive(seed, "next-item.dropout", index, number))
            parts = self.step()
            losses.append(sum(value.clone() for name, value in parts.items() if name.startswith("loss/")))
        return torch.stack(losses).mean().item()


def learn(
    method: str, settings: dict[str, Any], sequences: Sequences, config: NextItemConfig, device: torch.device
) -> Iterator[str | Outcome]:
    """Train until validation stops improving; yield a line for each pass, and finally the outcome."""
    data = LeaveOneOut.of(sequences, config.length).to(device)
    with cpu_threads(), seeded(config.seed, device), precision(config.precision):
        entry, spec = METHODS[method], next_item_spec(sequences.num_items, config.length)
        policy = entry.build(spec, entry.configure(**settings)).to(device)
        learner = Learner(policy, data, config)
        if device.type == "cuda":
            learner.capture()
        best, weights, best_epoch, epoch, started = -math.inf, {}, 0, 0, time.perf_counter()
        validation: dict[str, float] = {}
        for epoch in range(1, config.epochs + 1):
            loss, metrics = learner.epoch(epoch), score_questions(policy, data.validation)
            yield f"epoch {epoch}: loss {loss:.4f}, validation ndcg@10 {metrics['ndcg@10']:.4f}"
            if metrics["ndcg@10"] > best:
                best, best_epoch, validation = metrics["ndcg@10"], epoch, metrics
                weights = {name: value.clone() for name, value in policy.state_dict().items()}
            elif epoch - best_epoch >= config.patience:
                break
        seconds = time.perf_counter() - started
        policy.load_state_dict(weights or policy.state_dict())
        test = score_questions(policy, data.test)
    yield Outcome(validation=validation, test=test, best_epoch=best_epoch, epochs=epoch, seconds=seconds)
