"""Episodes of a log: what is known when, who is asked what, and that a policy can be trained and measured on them."""

from __future__ import annotations

import pytest
import torch

from tests.domains.movielens_twin import judge
from uat.acting import replay
from uat.contracts import Logits, Recording
from uat.data.movielens import Log, SyntheticConfig, synthetic
from uat.domains.movielens import MovieLens
from uat.domains.movielens import episodes as module
from uat.domains.movielens.episodes import Episodes, MovieLensConfig
from uat.domains.movielens.filter import posterior
from uat.episode import Trajectory
from uat.methods import METHODS

IDS, SEED = torch.arange(30), 4


@pytest.fixture(scope="module")
def log() -> Log:
    return synthetic(SyntheticConfig(num_users=300, num_items=400))


def happened(episodes: Episodes) -> Trajectory:
    return episodes.trajectory(episodes.noise(IDS, SEED))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_the_clock_tells_the_item_before_and_the_reward_after_its_delay(log: Log, delay: int) -> None:
    episodes = Episodes(MovieLensConfig(delay=delay), log, "test")
    logged = happened(episodes)
    batch = episodes.spec.clock.batch(logged)
    assert torch.equal(batch.obs, logged.obs)
    assert (batch.prev_action[:, 0] == -1).all()
    assert torch.equal(batch.prev_action[:, 1:], logged.obs[:, :-1])
    assert (batch.prev_reward[:, :delay] == 0).all()
    assert torch.equal(batch.prev_reward[:, delay:], logged.reward[:, : 50 - delay])


def test_targets_and_rewards_follow_the_regime(log: Log) -> None:
    episodes = Episodes(MovieLensConfig(), log, "validation")
    logged = happened(episodes)
    group_I, regime_BT = episodes.catalogue.group_I, logged.facts["regime"]
    assert torch.equal(group_I[logged.target], regime_BT)
    assert torch.equal(logged.reward > 0, group_I[logged.obs] == regime_BT)


def test_training_asks_anew_and_test_asks_the_same(log: Log) -> None:
    train, test = (Episodes(MovieLensConfig(draws=3), log, split) for split in ("train", "test"))
    assert isinstance(test, Recording)
    first, later = train.noise(IDS, SEED), train.noise(IDS + len(train), SEED)
    assert "negatives" not in first  # training needs no negatives
    assert not torch.equal(first["target"], later["target"])
    assert not torch.equal(first["window"], later["window"])
    whole = test.noise(torch.arange(len(test)), SEED)
    again = test.noise(torch.arange(len(test)) + len(test), SEED)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert torch.equal(whole["window"], torch.arange(len(test) // 3).repeat_interleave(3))
    assert not torch.equal(whole["regime"][::3], whole["regime"][1::3])
    assert (whole["negatives"] != whole["target"][:, -1:]).all()


def test_no_user_is_in_two_splits(log: Log) -> None:
    users = [set(Episodes(MovieLensConfig(), log, s).windows.user_W.tolist()) for s in ("train", "validation", "test")]
    assert sum(map(len, users)) == len(set.union(*users)) == log.num_users


@pytest.mark.parametrize("at_once", [1, 1 << 22])
def test_the_filter_is_measured_as_its_reference(log: Log, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter is scored like a policy by scores of all items, in parts of any size."""
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    episodes = Episodes(MovieLensConfig(), log, "test")
    noise, logged, group_I = episodes.noise(IDS, SEED), happened(episodes), episodes.catalogue.group_I
    belief_BG = posterior(episodes.law, group_I[logged.obs], logged.reward, delay=1)[:, -1]
    score_BI = (belief_BG / episodes.catalogue.size_G)[:, group_I]
    measured = episodes.judged(logged, noise, Logits(score_BI)).facts
    reference = judge(belief_BG, logged.facts["regime"][:, -1], episodes.catalogue, episodes.rankings[""])
    for name, value_B in reference.items():
        torch.testing.assert_close(measured[name], value_B)
    assert (measured["full_hr@10"] <= measured["hr@10"] + 1e-9).all()
    best_BI = torch.zeros_like(score_BI).scatter(1, logged.required_target[:, -1:], 1.0)
    assert (episodes.judged(logged, noise, Logits(best_BI)).facts["drawn_ndcg@10"] == 1).all()


def test_references_of_the_domain_stand_in_order() -> None:
    domain = MovieLens(MovieLensConfig(users=300, items=400))
    simulator = domain.simulator("test", "cpu")
    noise = simulator.noise(torch.arange(domain.episodes["test"]), SEED)
    hits = {
        name: domain.measure(replay(agent, simulator, noise))["hr@10"].mean().item()
        for name, agent in domain.references().items()
    }
    assert hits["random"] == pytest.approx(0.1)
    assert hits["random"] < hits["no-feedback"] < hits["ceiling"] - 0.05 < hits["expert"] - 0.1


def test_by_regime_the_hit_rate_is_that_of_its_episodes() -> None:
    domain = MovieLens(MovieLensConfig(users=300, items=400))
    simulator = domain.simulator("test", "cpu")
    found = domain.measure(replay(domain.references()["ceiling"], simulator, simulator.noise(IDS, SEED)))
    by_regime = torch.stack([found[f"hr@10_{name}"] for name in ("action", "comedy", "drama", "thriller")])
    assert ((~by_regime.isnan()).sum(0) == 1).all()
    torch.testing.assert_close(by_regime.nansum(0), found["hr@10"])


@pytest.mark.parametrize("name", ["uat", "vanilla", "adt", "dt"])
def test_policies_take_items(name: str, log: Log) -> None:
    episodes = Episodes(MovieLensConfig(), log, "train")
    entry = METHODS[name]
    torch.manual_seed(0)
    policy = entry.policy(episodes.spec, entry.configure())
    batch = episodes.spec.clock.batch(episodes.trajectory(episodes.noise(IDS[:6], SEED)))
    total, count = policy.loss(batch)["imitation"]
    (total / count).backward()
    assert count == 6 * 50
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="delay=-1 must not be negative"):
        MovieLensConfig(delay=-1)
    with pytest.raises(ValueError, match="limit=5 must be at least 10"):
        MovieLensConfig(limit=5)
