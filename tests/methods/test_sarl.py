"""SARL: it learns predictable movements, weights follow them, and both losses equal the equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.builders import SPECS, build_random, random_batch
from tests.methods.market import ASSETS, SPEC, batch_of, fit, signalled
from uat.methods.sarl import SARL, SARLConfig
from uat.training.surroundings import seeded

SMALL = {"d_movement": 8, "window": 4, "channels": 4, "d_evaluator": 6}


def policy(**settings: Any) -> SARL:
    with seeded(0, torch.device("cpu")):
        return SARL(SPEC, SARLConfig(**{**SMALL, **settings}))


def random_sarl(**settings: Any) -> SARL:
    found = build_random("sarl", SPECS["assets-weights"], **settings)
    assert isinstance(found, SARL)
    return found


def test_movements_that_can_be_told_are_learnt() -> None:
    sarl = policy()
    fit(sarl, sarl.phases()[0], 60)
    test = signalled(torch.Generator().manual_seed(7))
    told = sarl.movement(test.obs) > 0
    assert (told == (test.facts["relative"][..., 1:] > 1)).float().mean() > 0.95


def test_the_portfolio_holds_what_rises_and_cash_where_nothing_does() -> None:
    sarl = policy()
    for phase, batches in zip(sarl.phases(), (60, 80), strict=True):
        fit(sarl, phase, batches)
    test = signalled(torch.Generator().manual_seed(7))
    rises = test.facts["relative"] > 1
    with torch.no_grad():
        weights = sarl.logits(test).softmax(-1)
    some = rises.any(-1)
    assert (weights * rises).sum(-1)[some].mean() > 0.9
    assert weights[..., 0][~some].mean() > 0.8


def test_the_portfolio_leaves_the_predictor_alone() -> None:
    sarl, batch = policy(), signalled(torch.Generator().manual_seed(0))
    [total, _] = sarl.loss(batch)["growth"]
    total.backward()
    for part in (sarl.predictor, sarl.rise):
        assert all(p.grad is None for p in part.parameters())
    assert sarl.days.weight.grad is not None
    sarl.zero_grad()
    [total, _] = sarl.movement_loss(batch)["movement"]
    total.backward()
    assert sarl.days.weight.grad is None


def test_what_is_predicted_reaches_the_policy() -> None:
    sarl, batch = random_sarl(), random_batch(SPECS["assets-weights"])
    before = sarl.logits(batch)
    with torch.no_grad():
        sarl.rise.bias.add_(1.0)
    after = sarl.logits(batch)
    assert not torch.equal(before, after)
    assert torch.equal(before[..., 0], after[..., 0])  # cash has a score of its own


def test_losses_equal_the_equations() -> None:
    sarl = policy()
    generator = torch.Generator().manual_seed(3)
    obs, move = torch.randn(2, 5, ASSETS, 3, generator=generator), 0.1 * torch.randn(2, 5, ASSETS, generator=generator)
    allowed = torch.rand(2, 5, ASSETS + 1, generator=generator) < 0.7
    allowed[..., 0] = True
    batch = batch_of(obs, move, allowed)
    growth, entropy, held = 0.0, 0.0, 0
    weights, rise = sarl.logits(batch).softmax(-1), sarl.movement(obs).sigmoid()
    for b in range(2):
        for t in range(5):
            worth = weights[b, t, 0] + sum(weights[b, t, i + 1] * (1 + move[b, t, i]) for i in range(ASSETS))
            growth += 50 * torch.log(worth).item()
            for i in range(ASSETS):
                if allowed[b, t, i + 1]:
                    up, held = move[b, t, i] > 0, held + 1
                    entropy -= torch.log(rise[b, t, i] if up else 1 - rise[b, t, i]).item()
    total, count = sarl.loss(batch)["growth"]
    assert (total.item(), count.item()) == (pytest.approx(-growth, rel=1e-5), 10)
    total, count = sarl.movement_loss(batch)["movement"]
    assert (total.item(), count.item()) == (pytest.approx(entropy, rel=1e-5), held)


def test_only_the_last_days_of_the_state_count_but_the_predictor_remembers_all() -> None:
    """Without predictions, a day before the window has no influence; with them, every day has."""
    sarl = random_sarl(window=3)
    batch, other = (random_batch(SPECS["assets-weights"], seed=seed, whole=True) for seed in (1, 1))
    other.obs = other.obs.clone()
    other.obs[:, 0] += 1
    assert not torch.equal(sarl.logits(batch)[:, 3], sarl.logits(other)[:, 3])
    with torch.no_grad():
        sarl.rise.weight.zero_()
    assert torch.equal(sarl.logits(batch)[:, 3:], sarl.logits(other)[:, 3:])


@pytest.mark.parametrize(
    "wrong", [{"window": 2}, {"d_movement": 0}, {"channels": 0}, {"movement_share": 0.0}, {"movement_share": 1.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        SARLConfig(**wrong)
