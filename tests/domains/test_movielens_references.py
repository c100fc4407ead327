"""The exact filter and the analytic averages, against enumeration and simulation on small cases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.domains.movielens_twin import judge
from uat.clock import Clock
from uat.domains.movielens.filter import posterior
from uat.domains.movielens.ranking import Ranking, drawn, ranks
from uat.domains.movielens.references import Belief, Believer, every_regime, filtered, true_regime
from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards
from uat.episode import Trajectory

SMALL = RegimeLaw(num_groups=3, shortest=2, longest=3)


def schedules(law: RegimeLaw, horizon: int) -> Iterator[tuple[list[int], float]]:
    """Every way a regime can run, with its chance."""

    def go_on(so_far: list[int], chance: float) -> Iterator[tuple[list[int], float]]:
        if len(so_far) >= horizon:
            yield so_far[:horizon], chance
            return
        groups = [g for g in range(law.num_groups) if not so_far or g != so_far[-1]]
        lengths = range(law.shortest, law.longest + 1)
        for group in groups:
            for length in lengths:
                yield from go_on([*so_far, *[group] * length], chance / len(groups) / len(lengths))

    return go_on([], 1.0)


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("law", [SMALL, RegimeLaw(num_groups=4, shortest=1, longest=2)])
def test_the_filter_equals_enumeration(law: RegimeLaw, delay: int) -> None:
    horizon, ids = 6, torch.arange(20)
    regime_BT = law.draw(5, ids, horizon)
    group_BT = torch.randint(law.num_groups, (20, horizon), generator=torch.Generator().manual_seed(0))
    reward_BT = rewards(group_BT, torch.full(group_BT.shape, 3.0), regime_BT)
    found_BTG = posterior(law, group_BT, reward_BT, delay)
    ways = list(schedules(law, horizon))
    way_WT, chance_W = torch.tensor([way for way, _ in ways]), torch.tensor([p for _, p in ways], dtype=torch.float64)
    assert chance_W.sum().item() == pytest.approx(1)
    for b in range(20):
        fits_WT = (group_BT[b] == way_WT) == (reward_BT[b] > 0)
        for t in range(horizon):
            explained_W = chance_W * fits_WT[:, : max(0, t - delay + 1)].all(1)
            expected_G = torch.zeros(law.num_groups, dtype=torch.float64).index_add_(0, way_WT[:, t], explained_W)
            torch.testing.assert_close(found_BTG[b, t], expected_G / expected_G.sum(), rtol=0, atol=1e-12)


def test_the_filter_knows_no_reward_that_has_not_arrived() -> None:
    group_BT = torch.randint(4, (6, 30), generator=torch.Generator().manual_seed(1))
    law, rating_BT = RegimeLaw(), torch.full(group_BT.shape, 4.0)
    reward_BT = rewards(group_BT, rating_BT, law.draw(0, torch.arange(6), 30))
    late_BT = reward_BT.clone()
    late_BT[:, 20:] = rewards(group_BT, rating_BT, law.draw(9, torch.arange(6), 30))[:, 20:]
    a, b = (posterior(law, group_BT, r, delay=2) for r in (reward_BT, late_BT))
    assert torch.equal(a[:, :22], b[:, :22])
    assert not torch.equal(a[:, 22:], b[:, 22:])


def test_equal_observations_with_other_feedback_give_other_decisions() -> None:
    """The paper's feedback-informative definition."""
    group_BT = torch.tensor([[0, 1, 0], [0, 1, 0]])
    reward_BT = torch.tensor([[1.0, -0.2, 1.0], [-0.2, 1.0, -0.2]])
    belief_BG = posterior(RegimeLaw(), group_BT, reward_BT, delay=1)[:, -1]
    assert belief_BG.argmax(1).tolist() == [0, 1]


# ---------------------------------------------------------------- averages


@pytest.mark.parametrize(("num_items", "negatives"), [(40, 25), (30, 29), (8, 3)])
def test_the_average_over_negatives_equals_many_draws(num_items: int, negatives: int) -> None:
    """Scores with ties; the same target against many sets of negatives."""
    catalogue = Catalogue.of(torch.arange(num_items) % 2, 2)
    score_I = torch.randint(6, (num_items,), generator=torch.Generator().manual_seed(2)).double()
    ids, target = torch.arange(20_000), 5
    negative_BK = catalogue.negatives(0, ids, 0, torch.full_like(ids, target), negatives)
    candidate_BK = torch.cat([torch.full((len(ids), 1), target), negative_BK], dim=1)
    simulated = drawn(score_I[candidate_BK])
    wanted_I = torch.arange(num_items) == target
    exact = Ranking.sampled(num_items, negatives).expected(ranks(score_I[None], wanted_I[None]))
    for name, value_B in exact.items():
        assert simulated[name].mean().item() == pytest.approx(value_B.item(), abs=0.01), name


def test_the_average_over_targets_is_their_mean() -> None:
    score_BI = torch.randn(3, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted_BI = torch.rand(3, 50, generator=torch.Generator().manual_seed(4)) < 0.3
    ranking = Ranking.sampled(50, 30)
    found = ranking.expected(ranks(score_BI, wanted_BI))
    for b in range(3):
        for name, value_R in ranking.value_R.items():
            above = [int((score_BI[b] > score_BI[b, i]).sum()) for i in wanted_BI[b].nonzero()[:, 0]]
            assert found[name][b].item() == pytest.approx(value_R[above].mean().item()), name


def test_full_ranking_has_known_answers() -> None:
    score_BI = torch.arange(100.0, 0, -1)[None]
    for place, hits in {0: (1, 1), 9: (1, 1), 10: (0, 1), 20: (0, 0)}.items():
        wanted_BI = (torch.arange(100) == place)[None]
        found = Ranking.full(100).expected(ranks(score_BI, wanted_BI))
        assert (found["hr@10"].item(), found["hr@20"].item()) == pytest.approx(hits)
        assert found["ndcg@20"].item() == pytest.approx(hits[1] / math.log2(place + 2))
    tied = Ranking.full(100).expected(ranks(torch.zeros(1, 100), torch.ones(1, 100, dtype=torch.bool)))
    assert tied["hr@10"].item() == pytest.approx(0.1)


def test_one_draw_has_known_answers() -> None:
    score_BK = torch.tensor([[3.0, *[5.0] * 9, *[1.0] * 90], [3.0, *[5.0] * 10, *[1.0] * 89], [1.0] * 100])
    found = drawn(score_BK)
    assert found["hr@10"].tolist() == pytest.approx([1, 0, 0.1])
    assert found["hr@20"].tolist() == pytest.approx([1, 1, 0.2])
    assert found["ndcg@10"].tolist()[:2] == pytest.approx([1 / math.log2(11), 0])


def test_ranking_groups_equals_ranking_items() -> None:
    catalogue = Catalogue.of(torch.tensor([0] * 10 + [1] * 20 + [2] * 30), 3)
    belief_BG = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]).double()
    regime_B, ranking = torch.tensor([0, 1, 2, 0]), Ranking.sampled(60, 40)
    score_BI = (belief_BG / catalogue.size_G)[:, catalogue.group_I]
    slow = ranking.expected(ranks(score_BI, catalogue.group_I == regime_B[:, None]))
    for name, value_B in judge(belief_BG, regime_B, catalogue, ranking).items():
        torch.testing.assert_close(value_B, slow[name])


def test_references_equal_simulation_of_targets_and_negatives() -> None:
    """The whole question on a small catalogue: the regime is known, target and negatives are drawn."""
    catalogue = Catalogue.of(torch.tensor([0] * 10 + [1] * 20 + [2] * 30), 3)
    ids = torch.arange(40_000)
    regime_BT = SMALL.draw(0, ids, 4)
    target_B = catalogue.targets(0, ids, regime_BT)[:, -1]
    candidate_BK = torch.cat([target_B[:, None], catalogue.negatives(0, ids, 3, target_B, 40)], dim=1)
    belief_BG = torch.nn.functional.one_hot(regime_BT[:, -1], 3).double()
    score_BK = (belief_BG / catalogue.size_G).gather(1, catalogue.group_I[candidate_BK])
    exact = judge(belief_BG[:500], regime_BT[:500, -1], catalogue, Ranking.sampled(60, 40))
    by_regime = {int(r): v.item() for r, v in zip(regime_BT[:500, -1], exact["hr@10"], strict=True)}
    expected = sum(by_regime[r] * (regime_BT[:, -1] == r).double().mean().item() for r in range(3))
    assert drawn(score_BK)["hr@10"].mean().item() == pytest.approx(expected, abs=0.01)


def test_less_is_known_later() -> None:
    catalogue, law, ids = Catalogue.of(torch.arange(400) % 4, 4), RegimeLaw(), torch.arange(900)
    item_BT = torch.randint(400, (900, 50), generator=torch.Generator().manual_seed(0))
    regime_BT = law.draw(0, ids, 50)
    reward_BT = rewards(catalogue.group_I[item_BT], torch.full(item_BT.shape, 3.0), regime_BT)
    logged = Trajectory(
        obs=item_BT,
        action=item_BT,
        reward=reward_BT,
        terminated=torch.zeros_like(item_BT, dtype=torch.bool),
        target=item_BT,
        valid=torch.ones_like(item_BT, dtype=torch.bool),
        facts={"regime": regime_BT},
    )
    batch = Clock().batch(logged)

    def hits(belief: Belief) -> float:
        score_BI = Believer(catalogue, belief).read(batch).every(slice(None))
        place = ranks(score_BI, catalogue.group_I == regime_BT[:, -1:])
        return Ranking.sampled(400).expected(place)["hr@10"].mean().item()

    ceiling = {delay: hits(filtered(law, delay)) for delay in (0, 1, 5)}
    assert hits(every_regime) == pytest.approx(0.1, abs=0.02)
    assert hits(every_regime) + 0.05 < ceiling[5] < ceiling[1] < ceiling[0] < hits(true_regime)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="negatives=99 must be within"):
        Ranking.sampled(50)
    with pytest.raises(ValueError, match="delay=-1 must not be negative"):
        posterior(RegimeLaw(), torch.zeros(1, 1), torch.zeros(1, 1), -1)
