"""Sizes of the terms of attention logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.builders import SPECS, build, build_random, build_uat, random_batch, randomise
from tests.training.small_runs import tiny
from uat.methods.uat import UAT
from uat.paper.mechanism import term_sizes, terms_of_runs
from uat.paper.mechanism.attention import centred, logit_split
from uat.paper.mechanism.terms import TERMS
from uat.training import train

SPEC = SPECS["vector-discrete"]


def test_without_gates_only_observations_speak() -> None:
    sizes = term_sizes(build("uat", SPEC), random_batch(SPEC, whole=True))  # a fresh UAT's gates are zero
    assert list(sizes) == list(TERMS)
    assert sizes["ℓ0"].min() > 0
    assert all(sizes[name].max() == 0 for name in TERMS[1:])


def test_the_first_term_is_the_base_of_the_logit() -> None:
    policy, batch = build_random("uat", SPEC), random_batch(SPEC, whole=True)
    base_LBHTT, _ = logit_split(policy, batch)
    expected_LB = centred(base_LBHTT).abs().nanmean((2, 3, 4))
    torch.testing.assert_close(term_sizes(policy, batch)["ℓ0"], expected_LB, rtol=0, atol=1e-12)


def test_each_gate_has_its_terms() -> None:
    """With one gate shut, only the other's terms are left; ℓ3 needs both."""
    for shut, silent in (("regime", ("ℓ2", "ℓ3")), ("token", ("ℓ1", "ℓ3"))):
        policy = randomise(build_uat(SPEC), 0)
        assert isinstance(policy, UAT)
        with torch.no_grad():
            policy.utility.get_submodule(shut).get_parameter("weight").zero_()
        sizes = term_sizes(policy, random_batch(SPEC, whole=True))
        assert {name for name in TERMS if sizes[name].max() == 0} == set(silent)


def test_padding_does_not_count() -> None:
    policy, batch = build_random("uat", SPEC), random_batch(SPEC, episodes=4)
    dirty = replace(batch, obs=torch.where(batch.valid[..., None], batch.obs, 99.0))
    for name, size_LB in term_sizes(policy, batch).items():
        torch.testing.assert_close(size_LB, term_sizes(policy, dirty)[name], rtol=0, atol=1e-10)


def test_policies_without_these_terms_are_refused() -> None:
    for name in ("vanilla", "uat-late"):
        with pytest.raises(ValueError, match="has no gates of the paper"):
            term_sizes(build(name, SPEC), random_batch(SPEC))


def test_rows_of_a_run_hold_shares_that_add_up(tmp_path: Path) -> None:
    run = train(tiny(), tmp_path / "run", device="cpu")
    rows = terms_of_runs([run], episodes=4, device="cpu")
    layers = {row["layer"] for row in rows}
    assert len(rows) == len(TERMS) * len(layers)
    for layer in layers:
        own = [row for row in rows if row["layer"] == layer]
        assert sum(row["share"] for row in own) == pytest.approx(1.0)
        assert all(row["low"] <= row["value"] <= row["high"] for row in own)
