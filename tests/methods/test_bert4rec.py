"""BERT4Rec: masks, bidirectional attention, and a Cloze test with a known answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.builders import SPECS, build_random, moments, random_batch, small_config, stream
from uat.engines import Engine
from uat.episode import Batch
from uat.methods.bert4rec import BERT4Rec, BERT4RecConfig
from uat.paper.next_item import as_batch, next_item_spec
from uat.training.surroundings import seeded

SPEC = SPECS["items-discrete"]
CPU = torch.device("cpu")


def bert4rec(**settings: Any) -> BERT4Rec:
    return cast(BERT4Rec, build_random("bert4rec", SPEC, **settings))


# ---------------------------------------------------------------- the Cloze test


def test_what_is_masked() -> None:
    """Masks hide a share of the steps, always the last real one, never padding; in some episodes only the last."""
    policy = bert4rec(mask_share=0.3, last_share=0.25)
    valid_BT = torch.arange(20) < torch.randint(1, 21, (4000, 1), generator=torch.Generator().manual_seed(0))
    last_BT = torch.arange(20) == valid_BT.sum(1, keepdim=True) - 1
    hidden_BT = policy.hidden(valid_BT)
    assert hidden_BT[last_BT].all()
    assert not hidden_BT[~valid_BT].any()
    inner_BT = valid_BT & ~last_BT
    assert hidden_BT[inner_BT].float().mean().item() == pytest.approx(0.75 * 0.3, abs=0.01)
    long_B = valid_BT.sum(1) == 20
    assert (hidden_BT[long_B].sum(1) == 1).float().mean().item() == pytest.approx(0.25, abs=0.08)
    assert torch.equal(hidden_BT, policy.hidden(valid_BT))
    Engine(policy).reseed(1)
    assert not torch.equal(hidden_BT, policy.hidden(valid_BT))
    assert torch.equal(bert4rec(last_share=1.0).hidden(valid_BT), last_BT)
    assert torch.equal(bert4rec(mask_share=1.0, last_share=0.0).hidden(valid_BT), valid_BT)


class Gapped(BERT4Rec):
    """The loss is at step 2 and at the last step."""

    def hidden(self, valid_BT: Tensor) -> Tensor:
        return (torch.arange(valid_BT.shape[1]) == 2).expand_as(valid_BT) | self._last(valid_BT)


def test_a_mask_hides_its_item_and_both_sides_of_it_are_seen() -> None:
    policy, batch = bert4rec(), random_batch(SPEC, episodes=1, whole=True)
    policy.__class__ = Gapped
    batch.required_target[:, -1] = -1  # the answer at the end counts for nothing: step 2 alone is looked at

    def loss(obs_BT: Tensor) -> Tensor:
        return policy.loss(replace(batch, obs=obs_BT))["cloze"][0]

    def other_item(place: int) -> Tensor:
        obs_BT = batch.obs.clone()
        obs_BT[:, place] = (obs_BT[:, place] + 1) % 11
        return obs_BT

    before = loss(batch.obs)
    for place in range(SPEC.steps):
        assert (loss(other_item(place)) == before) == (place == 3), place


def test_blocks_equal_those_of_torch() -> None:
    policy, batch = bert4rec(), random_batch(SPEC, episodes=4)
    c, hidden_BT = policy.config, policy.hidden(batch.valid)
    x_BSD, visible_BS = policy._gapped(batch, hidden_BT)
    found = policy.backbone(x_BSD, policy.backbone.keys_values(x_BSD), visible_BS=visible_BS)
    expected = x_BSD
    for block in policy.backbone._layers():
        twin = nn.TransformerEncoderLayer(
            c.d_model, c.num_heads, c.d_ff, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
        )
        own = {
            "self_attn.in_proj_weight": torch.cat([block.query.weight, block.key_value.weight]),
            "self_attn.in_proj_bias": torch.cat([block.query.bias, block.key_value.bias]),
            **{f"self_attn.out_proj.{k}": v for k, v in block.out.state_dict().items()},
            **{f"linear1.{k}": v for k, v in cast(nn.Linear, block.ff[0]).state_dict().items()},
            **{f"linear2.{k}": v for k, v in cast(nn.Linear, block.ff[2]).state_dict().items()},
            **{f"norm1.{k}": v for k, v in block.attention_norm.state_dict().items()},
            **{f"norm2.{k}": v for k, v in block.ff_norm.state_dict().items()},
        }
        twin.load_state_dict(own)
        expected = twin(expected, src_key_padding_mask=~visible_BS)
    torch.testing.assert_close(found[visible_BS], expected[visible_BS], rtol=0, atol=1e-10)


def alphabet(letters: int, steps: int) -> Batch:
    """Segments of a circular alphabet of every start and length, whose targets are the following letters."""
    start_B, length_B = torch.cartesian_prod(torch.arange(letters), torch.arange(1, steps + 1)).unbind(1)
    letter_BT = (start_B[:, None] + torch.arange(steps)) % letters
    padding_BT = torch.arange(steps) >= length_B[:, None]
    return as_batch(letter_BT.masked_fill(padding_BT, -1), ((letter_BT + 1) % letters).masked_fill(padding_BT, -1))


def test_cloze_learns_a_toy_alphabet_exactly() -> None:
    """The policy learns from gaps with both sides visible, and decides from the past alone."""
    batch = alphabet(12, 6)
    with seeded(0, CPU):
        config = BERT4RecConfig(d_model=16, num_heads=2, num_layers=1, d_ff=32, dropout=0.0, mask_share=0.5)
        policy = BERT4Rec(next_item_spec(12, 6), config)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        losses = []
        for number in range(400):
            Engine(policy).reseed(number)
            total, count = policy.loss(batch)["cloze"]
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append((total / count).item())
    assert sum(losses[-50:]) / 50 < 0.05  # gaps differ from step to step, and so does their loss
    decided_BT = policy.eval().logits(batch).argmax(-1)
    assert torch.equal(decided_BT[batch.valid], batch.required_target[batch.valid])


# ---------------------------------------------------------------- deciding


def test_a_mask_behind_the_prefix_gives_the_answer() -> None:
    """The decision at t equals the Cloze answer of an episode that ends at t."""
    policy, batch = bert4rec(), random_batch(SPEC, whole=True)
    decided_BTI = policy.logits(batch)
    for t in range(SPEC.steps):
        short = replace(batch, valid=batch.valid & (torch.arange(SPEC.steps) <= t))
        answer_BI = policy.head.logits(policy.final(short))
        torch.testing.assert_close(answer_BI, decided_BTI[:, t], rtol=0, atol=1e-10)


def test_a_restarted_stream_begins_anew_and_reads_nothing_that_is_not_its_own() -> None:
    policy, batch = bert4rec(), random_batch(SPEC, whole=True)
    expected = stream(policy, batch)
    state = policy.init_state(3, SPEC.steps, CPU)
    state.x_BSD.fill_(1e30)
    state.kv_BSF.fill_(1e30)
    with torch.no_grad():
        for moment in list(moments(random_batch(SPEC, seed=5, whole=True)))[:4]:
            _, state = policy.step(state, moment)
        for t, moment in enumerate(moments(batch)):
            logits_BI, state = policy.step(state, moment)
            torch.testing.assert_close(logits_BI, expected[:, t], rtol=0, atol=1e-10)


def test_longer_episodes_are_refused() -> None:
    policy = bert4rec()
    with pytest.raises(ValueError, match=r"8 steps do not fit .* horizon of 7"):
        policy.init_state(1, 8, CPU)
    longer = random_batch(SPEC, steps=8)
    for ask in (policy.features, policy.loss, policy.final):
        with pytest.raises(ValueError, match=r"8 steps do not fit .* horizon of 7"):
            ask(longer)


@pytest.mark.parametrize("name", ["mask_share", "last_share"])
def test_bad_settings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=1.5"):
        small_config("bert4rec", **{name: 1.5})
