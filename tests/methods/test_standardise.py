"""Observations are standardised once, wherever they enter, and the statistics are saved with the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import uat
from tests.builders import ALL_SPECS, build_random, random_trajectory, stream
from uat.episode import Trajectory
from uat.nn.encoders import VectorEncoder, vector_parts
from uat.runs import RunError
from uat.serving import Session
from uat.spec import Spec

KINDS = ("vector-discrete", "assets-weights", "named-discrete", "vector-box")


def far_off(spec: Spec, seed: int = 0) -> Trajectory:
    """Observations that need standardising: far from zero, and of very different sizes."""
    told = random_trajectory(spec, episodes=6, seed=seed, masked=False)
    obs = told.obs * 30 + 200
    return replace(told, obs=obs.masked_fill(~told.valid.view(*told.valid.shape, *[1] * (obs.dim() - 2)), torch.nan))


def plain_numbers(spec: Spec, told: Trajectory) -> Trajectory:
    """Such observations with valid item ids."""
    if spec is not ALL_SPECS["named-discrete"]:
        return told
    return replace(told, obs=torch.cat([told.obs[..., :1].clamp(0, 6).round(), told.obs[..., 1:]], dim=-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["uat", "dt", "gtrxl"])
def test_every_number_comes_in_with_mean_zero_and_deviation_one(method: str, kind: str) -> None:
    spec = ALL_SPECS[kind]
    policy, told = build_random(method, spec), plain_numbers(spec, far_off(spec))
    policy.standardise(told)
    encoder = policy.observation_encoder
    assert encoder is not None
    parts = vector_parts(encoder, spec.obs, told.obs[told.valid])
    assert len(parts) == (2 if kind == "named-discrete" else 1)
    for part, value in parts:
        seen = part.flat(value)
        torch.testing.assert_close(seen.mean(0), torch.zeros_like(seen[0]), atol=1e-6, rtol=0)
        torch.testing.assert_close(seen.std(0, correction=0), torch.ones_like(seen[0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_and_steps_are_standardised_alike(kind: str) -> None:
    spec = ALL_SPECS[kind]
    policy, told = build_random("uat", spec), plain_numbers(spec, far_off(spec))
    before = policy.logits(spec.clock.batch(told))
    policy.standardise(told)
    batch = spec.clock.batch(told)
    after = policy.logits(batch)
    assert not torch.allclose(before[told.valid], after[told.valid])
    torch.testing.assert_close(stream(policy, batch)[told.valid], after[told.valid], rtol=0, atol=1e-10)


def test_statistics_by_hand_and_a_number_that_never_changes() -> None:
    spec = replace(ALL_SPECS["vector-discrete"], horizon=2)
    policy = build_random("vanilla", spec)
    obs = torch.tensor([[[1.0, 5, 0, 0, 0.1]], [[3.0, 5, 0, 0, 0.1]]])
    log = {"action": [[0], [1]], "reward": [[0.0], [0.0]]}
    told = uat.episodes(spec, obs=obs, **log)
    policy.standardise(told.map(lambda x: x[:1]), told.map(lambda x: x[1:]))
    encoder = policy.observation_encoder
    assert isinstance(encoder, VectorEncoder)
    assert encoder.normalizer is not None
    assert encoder.normalizer.mean[:2].tolist() == [2, 5]
    assert encoder.normalizer.scale.tolist() == [1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="standardised already"):
        policy.standardise(told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_the_statistics_and_a_session_takes_raw_observations(kind: str, tmp_path: Path) -> None:
    spec, file = ALL_SPECS[kind], tmp_path / "policy.safetensors"
    policy, told = build_random("uat", spec, dtype=torch.float32), plain_numbers(spec, far_off(spec))
    policy.standardise(told)
    uat.save(file, policy, "uat")
    again = uat.load(file)
    assert again.state_dict().keys() == policy.state_dict().keys()
    batch = spec.clock.batch(told)
    assert torch.equal(again.logits(batch)[told.valid], policy.logits(batch)[told.valid])
    session = Session(again, streams=6)
    assert session.path == "cached"
    first = session.act(torch.nan_to_num(told.obs[:, 0]))
    assert torch.equal(first, Session(policy, streams=6).act(torch.nan_to_num(told.obs[:, 0])))


def test_what_cannot_be_standardised_says_so(tmp_path: Path) -> None:
    for method, kind in (("uat", "items-discrete"), ("cadm", "vector-discrete")):
        spec = ALL_SPECS[kind]
        with pytest.raises(ValueError, match="has no numbers to standardise"):
            build_random(method, spec).standardise(random_trajectory(spec))
    spec = ALL_SPECS["vector-discrete"]
    plain = build_random("uat", spec, dtype=torch.float32)
    weights = {**plain.state_dict(), "head.normalizer.mean": torch.zeros(5)}
    with pytest.raises((ValueError, RunError), match=r"head.normalizer.mean is unknown"):
        uat.save(tmp_path / "wrong.safetensors", plain, "uat", weights=weights)


@pytest.mark.parametrize("kind", ["vector-discrete", "assets-weights"])
@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_policies_that_adapt_while_acting_standardise_as_well(method: str, kind: str) -> None:
    """Raw observations give the decisions of a policy that receives them standardised by hand."""
    spec = ALL_SPECS[kind]
    policy, twin = (build_random(method, spec, adaptation_rate=0.05) for _ in range(2))
    told = random_trajectory(spec, episodes=6, masked=False, whole=True)
    told = replace(told, obs=told.obs.double() * 30 + 200)
    policy.standardise(told)
    encoder = policy.observation_encoder
    assert isinstance(encoder, VectorEncoder)
    assert encoder.normalizer is not None
    normalizer = encoder.normalizer
    by_hand = replace(told, obs=encoder.flat(told.obs).view_as(told.obs))
    found, expected = (
        stream(agent, spec.clock.batch(episodes)) for agent, episodes in ((policy, told), (twin, by_hand))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    encoder.normalizer = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="normalizer is of class Identity, expected Normalizer"):
        policy.init_state(2, 3, "cpu")
    encoder.normalizer = normalizer
    normalizer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="normalizer has a forward hook"):
        policy.init_state(2, 3, "cpu")
