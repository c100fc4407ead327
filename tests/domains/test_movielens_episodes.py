"""Episodes of a log: what is known when, who is asked what, and that a policy can be trained and measured on them."""

from __future__ import annotations

import pytest
import torch

from uat.data.movielens import Log, SyntheticConfig, synthetic
from uat.domains.movielens.episodes import Episodes, MovieLensConfig
from uat.domains.movielens.filter import posterior
from uat.domains.movielens.references import judge
from uat.methods import METHODS

IDS, SEED = torch.arange(30), 4


@pytest.fixture(scope="module")
def log() -> Log:
    return synthetic(SyntheticConfig(num_users=300, num_items=400))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_the_clock_tells_the_item_before_and_the_reward_after_its_delay(log: Log, delay: int) -> None:
    episodes = Episodes(MovieLensConfig(delay=delay), log, "test")
    happened = episodes.trajectory(IDS, SEED)
    batch = episodes.spec.clock.batch(happened)
    assert torch.equal(batch.obs, happened.obs)
    assert (batch.prev_action[:, 0] == -1).all()
    assert torch.equal(batch.prev_action[:, 1:], happened.obs[:, :-1])
    assert (batch.prev_reward[:, :delay] == 0).all()
    assert torch.equal(batch.prev_reward[:, delay:], happened.reward[:, : 50 - delay])


def test_targets_and_rewards_follow_the_regime(log: Log) -> None:
    episodes = Episodes(MovieLensConfig(), log, "validation")
    happened = episodes.trajectory(IDS, SEED)
    group_I, regime_BT = episodes.catalogue.group_I, happened.facts["regime"]
    assert torch.equal(group_I[happened.target], regime_BT)
    assert torch.equal(happened.reward > 0, group_I[happened.obs] == regime_BT)


def test_episodes_depend_on_seed_and_id_alone_and_training_asks_anew(log: Log) -> None:
    some = torch.tensor([11, 2])
    for split in ("train", "test"):
        episodes = Episodes(MovieLensConfig(), log, split)
        whole, part = episodes.trajectory(IDS, SEED), episodes.trajectory(some, SEED)
        for name in ("obs", "reward", "target"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[some]), name
        assert torch.equal(episodes.candidates(some, SEED), episodes.candidates(IDS, SEED)[some])
        later = episodes.trajectory(IDS + len(episodes), SEED)
        assert not torch.equal(later.target, whole.target)


def test_no_user_is_in_two_splits(log: Log) -> None:
    users = [set(Episodes(MovieLensConfig(), log, s).windows.user_W.tolist()) for s in ("train", "validation", "test")]
    assert sum(map(len, users)) == len(set.union(*users)) == log.num_users


def test_the_filter_is_measured_as_its_reference(log: Log) -> None:
    """Through scores of every item, as a policy is."""
    episodes = Episodes(MovieLensConfig(), log, "test")
    happened = episodes.trajectory(IDS, SEED)
    group_I = episodes.catalogue.group_I
    belief_BG = posterior(episodes.law, group_I[happened.obs], happened.reward, delay=1)[:, -1]
    score_BI = (belief_BG / episodes.catalogue.size_G)[:, group_I]
    measured = episodes.measure(score_BI, IDS, SEED)
    reference = judge(belief_BG, happened.facts["regime"][:, -1], episodes.catalogue, episodes.rankings[""])
    for name, value_B in reference.items():
        torch.testing.assert_close(measured[name], value_B)
    assert (measured["full_hr@10"] <= measured["hr@10"] + 1e-9).all()
    best_BI = torch.zeros_like(score_BI).scatter(1, happened.target[:, -1:], 1.0)
    assert (episodes.measure(best_BI, IDS, SEED)["drawn_ndcg@10"] == 1).all()


@pytest.mark.parametrize("name", ["uat", "vanilla", "adt", "dt"])
def test_policies_take_items(name: str, log: Log) -> None:
    episodes = Episodes(MovieLensConfig(), log, "train")
    entry = METHODS[name]
    torch.manual_seed(0)
    policy = entry.policy(episodes.spec, entry.configure())
    batch = episodes.spec.clock.batch(episodes.trajectory(IDS[:6], SEED))
    total, count = policy.loss(batch)["imitation"]
    (total / count).backward()
    assert count == 6 * 50
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())
    score_BI = policy.head.logits(policy.features(batch)[:, -1]).detach()
    assert all(value_B.isfinite().all() for value_B in episodes.measure(score_BI, IDS[:6], SEED).values())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="delay=-1 must not be negative"):
        MovieLensConfig(delay=-1)
    with pytest.raises(ValueError, match="limit=5 must be at least 10"):
        MovieLensConfig(limit=5)
