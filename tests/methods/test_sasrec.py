"""SASRec equals its equations, and attends only to the past."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.builders import SIZES, SPECS, build, build_random, random_batch
from uat.engines import Engine
from uat.episode import Batch
from uat.methods.sasrec import SASRec, SASRecConfig
from uat.noise import integers

SPEC = SPECS["items-discrete"]


def sasrec(**settings: Any) -> SASRec:
    return cast(SASRec, build_random("sasrec", SPEC, **settings))


def by_the_equations(policy: SASRec, obs_T: Tensor) -> Tensor:
    """Logits (T, I) of one episode, position by position and head by head."""
    weights, c = policy.state_dict(), policy.config
    table, size = weights["head.linear.weight"], c.d_model // c.num_heads
    none = torch.zeros(c.d_model, dtype=table.dtype)
    x = [(table[item] if item >= 0 else none) * c.d_model**0.5 for item in obs_T.tolist()]
    x = [row + weights["backbone.positions"][t] for t, row in enumerate(x)]

    def norm(name: str, row: Tensor) -> Tensor:
        return F.layer_norm(row, (c.d_model,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    for layer in range(c.num_layers):
        at = f"backbone.blocks.{layer}"
        q, k, v = zip(
            *((weights[f"{at}.attention.project.weight"] @ norm(f"{at}.attention_norm", row)).chunk(3) for row in x),
            strict=True,
        )
        attended = []
        for t in range(len(x)):
            heads = []
            for h in range(c.num_heads):
                part = slice(h * size, (h + 1) * size)
                alpha = torch.stack([q[t][part] @ k[j][part] / size**0.5 for j in range(t + 1)]).softmax(0)
                heads.append(sum(alpha[j] * v[j][part] for j in range(t + 1)))
            out = torch.cat(cast(list[Tensor], heads))
            attended.append(weights[f"{at}.attention.out.weight"] @ out + weights[f"{at}.attention.out.bias"])
        x = [row + add for row, add in zip(x, attended, strict=True)]
        for t, row in enumerate(x):
            inner = weights[f"{at}.ff.0.weight"] @ norm(f"{at}.ff_norm", row) + weights[f"{at}.ff.0.bias"]
            x[t] = row + weights[f"{at}.ff.2.weight"] @ inner.relu() + weights[f"{at}.ff.2.bias"]
    return torch.stack([table @ norm("backbone.last_norm", row) for row in x])


def test_pass_equals_the_equations() -> None:
    policy, batch = sasrec(), random_batch(SPEC, whole=True)
    for logits, obs_T in zip(policy.logits(batch), batch.obs, strict=True):
        torch.testing.assert_close(logits, by_the_equations(policy, obs_T), rtol=0, atol=1e-10)


def test_every_item_of_the_past_is_seen_and_none_of_the_future() -> None:
    policy, batch = sasrec(), random_batch(SPEC, whole=True)
    before = policy.logits(batch)
    for t in range(SPEC.steps):
        obs = batch.obs.clone()
        obs[:, t] = (obs[:, t] + 1) % 11
        changed = (policy.logits(Batch(**{**fields_of(batch), "obs": obs})) != before).any(-1)
        assert not changed[:, :t].any()
        assert changed[:, t:].all()


def fields_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("obs", "prev_action", "prev_reward", "target", "valid")}


def test_items_go_in_and_out_by_one_table() -> None:
    """The parameters are those of the table, the positions and the blocks, without a bias over items."""
    policy = build("sasrec", SPEC)
    d, d_ff, layers = SIZES["d_model"], SIZES["d_ff"], SIZES["num_layers"]
    block = 4 * d * d + d + 2 * d * d_ff + d_ff + d + 4 * d
    assert sum(p.numel() for p in policy.parameters()) == 11 * d + (SPEC.steps + 1) * d + layers * block + 2 * d
    assert (policy.head.logits(torch.zeros(d, dtype=torch.float64)) == 0).all()


@pytest.mark.parametrize("negatives", [1, 3])
def test_sampled_loss_equals_the_equations(negatives: int) -> None:
    policy, batch = sasrec(negatives=negatives), random_batch(SPEC, episodes=6)
    Engine(policy).reseed(5)
    total, count = policy.loss(batch)["binary"]
    assert count == batch.valid.sum()
    logits, expected, skipped = policy.logits(batch).sigmoid(), 0.0, 0
    drawn = integers(
        0, "sasrec.negatives", policy.get_buffer("sampling_seed") + torch.arange(6), 7 * negatives, below=11
    )
    for b in range(6):
        for t in range(int(batch.valid[b].sum())):
            expected -= logits[b, t, batch.required_target[b, t]].log()
            for item in drawn[b, t * negatives : (t + 1) * negatives].tolist():
                if item in batch.obs[b].tolist() or item == batch.required_target[b, t]:
                    skipped += 1
                else:
                    expected -= (1 - logits[b, t, item]).log()
    assert skipped > 0
    torch.testing.assert_close(total, expected)
    Engine(policy).reseed(6)
    assert policy.loss(batch)["binary"][0] != total


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="negatives=-1"):
        SASRecConfig(negatives=-1)
