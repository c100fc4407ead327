"""The cache equals growing lists, and never reads slots filled with huge numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import SPECS, build_random, moments, random_batch, randomise
from uat.methods import Policy
from uat.nn.attention import Attention, attend_to_slots
from uat.nn.cache import KVCache, RollingCache

LAYERS, STREAMS, HEADS, E = 2, 3, 2, 4
POISON = 1e18


def empty(capacity: int) -> KVCache:
    like = torch.zeros((), dtype=torch.float64)
    return KVCache.empty(layers=LAYERS, streams=STREAMS, heads=HEADS, capacity=capacity, d_head=E, like=like)


@given(restarts=st.lists(st.tuples(*[st.booleans()] * STREAMS), min_size=1, max_size=9), seed=st.integers(0, 2**31))
def test_cache_remembers_what_lists_remember(restarts: list[tuple[bool, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache, remembered = empty(len(restarts)), [[] for _ in range(STREAMS)]
    for first in restarts:
        cache.restart(torch.tensor(first))
        for stream, anew in enumerate(first):
            remembered[stream] = [] if anew else remembered[stream]
        kv_L2BHE = torch.randn(LAYERS, 2, STREAMS, HEADS, E, dtype=torch.float64, generator=generator)
        for stream in range(STREAMS):
            remembered[stream].append(kv_L2BHE[:, :, stream])
        written = [cache.write(layer, k_BHE, v_BHE) for layer, (k_BHE, v_BHE) in enumerate(kv_L2BHE)]
        visible_BS = cache.visible()
        for stream, steps in enumerate(remembered):
            assert visible_BS[stream].tolist() == [s < len(steps) for s in range(len(restarts))]
            for layer, (k_BHSE, v_BHSE) in enumerate(written):
                for s, kept_L2HE in enumerate(steps):
                    assert torch.equal(k_BHSE[stream, :, s], kept_L2HE[layer, 0])
                    assert torch.equal(v_BHSE[stream, :, s], kept_L2HE[layer, 1])
        cache.advance()
        assert cache.length_B.tolist() == [len(steps) for steps in remembered]


@given(restarts=st.lists(st.tuples(*[st.booleans()] * STREAMS), min_size=1, max_size=9), seed=st.integers(0, 2**31))
def test_a_window_holds_what_the_whole_cache_shows(restarts: list[tuple[bool, ...]], seed: int) -> None:
    """The step reads as many slots as the longest stream has filled, with a mask only if lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    cache, whole = empty(len(restarts) + 2), empty(len(restarts) + 2)
    for first in restarts:
        cache.restart(torch.tensor(first))
        whole.restart(torch.tensor(first))
        window, visible_BS = cache.window(), whole.visible()
        lengths = whole.length_B.tolist()
        assert window.slots == max(lengths) + 1
        assert (window.visible_BS is None) == (len(set(lengths)) == 1)
        if window.visible_BS is not None:
            assert torch.equal(window.visible_BS, visible_BS[:, : window.slots])
        assert not visible_BS[:, window.slots :].any()
        k_BHE, v_BHE = torch.randn(2, STREAMS, HEADS, E, dtype=torch.float64, generator=generator)
        for found, expected in zip(cache.write(0, k_BHE, v_BHE, window), whole.write(0, k_BHE, v_BHE), strict=True):
            assert torch.equal(found, expected[:, :, : window.slots])
        assert torch.equal(cache.kv_L2BHSE, whole.kv_L2BHSE)
        cache.advance()
        whole.advance()


def test_no_streams_have_a_window_too() -> None:
    like = torch.zeros(())
    cache = KVCache.empty(layers=1, streams=0, heads=HEADS, capacity=3, d_head=E, like=like)
    k_BHSE, v_BHSE = cache.write(0, torch.zeros(0, HEADS, E), torch.zeros(0, HEADS, E), cache.window())
    assert k_BHSE.shape == v_BHSE.shape == (0, HEADS, 3, E)


def test_a_step_past_the_capacity_is_refused() -> None:
    cache, kv_BHE = empty(1), torch.zeros(STREAMS, HEADS, E, dtype=torch.float64)
    cache.write(0, kv_BHE, kv_BHE, cache.window())
    cache.advance()
    with pytest.raises(IndexError):
        cache.write(0, kv_BHE, kv_BHE, cache.window())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_looking_back_is_attention(rows: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(STREAMS, HEADS, s, E, dtype=torch.float64, generator=generator) for s in (rows, 63, 63))
    visible_BS = torch.arange(63) <= torch.tensor([[0], [20], [62]]) if masked else None
    mask = None if visible_BS is None else visible_BS[:, None, None]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attend_to_slots(q, k, v, visible_BS), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_looking_back_rounds_no_more_than_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(STREAMS, HEADS, s, E, generator=generator).to(dtype) for s in (1, 63, 63))
    assert torch.equal(attend_to_slots(q, k, v, None), F.scaled_dot_product_attention(q, k, v))


@given(
    restarts=st.lists(st.tuples(*[st.integers(0, 9).map(lambda x: x == 0)] * STREAMS), min_size=1, max_size=24),
    context=st.integers(1, 5),
    tokens_per_step=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_rolling_cache_remembers_the_last_steps(
    restarts: list[tuple[bool, ...]], context: int, tokens_per_step: int, seed: int
) -> None:
    """Read in the order of its distances, a stream is the end of a list that grows: the present step, which may be
    incomplete, and the whole steps before it."""
    generator, like = torch.Generator().manual_seed(seed), torch.zeros((), dtype=torch.float64)
    capacity = context * tokens_per_step
    cache = RollingCache.empty(layers=1, streams=STREAMS, heads=HEADS, capacity=capacity, d_head=E, like=like)
    cache.tokens_per_step = tokens_per_step
    cache.kv_L2BHSE.fill_(POISON)
    remembered: list[list[Tensor]] = [[] for _ in range(STREAMS)]
    for first in restarts:
        cache.restart(torch.tensor(first))
        kv_2BHE = torch.randn(2, STREAMS, HEADS, E, dtype=torch.float64, generator=generator)
        for stream, anew in enumerate(first):
            remembered[stream] = [*([] if anew else remembered[stream]), kv_2BHE[:, stream]]
        window = cache.window()
        kv_2BHSE = torch.stack(cache.write(0, kv_2BHE[0], kv_2BHE[1], window))
        distance_BS, visible_BS = cache.distance()[:, : window.slots], cache.visible()
        assert not visible_BS[:, window.slots :].any()
        visible_BS = visible_BS[:, : window.slots]
        assert visible_BS.all() if window.visible_BS is None else torch.equal(window.visible_BS, visible_BS)
        for stream, steps in enumerate(remembered):
            ages = distance_BS[stream, visible_BS[stream]].tolist()
            begun = (len(steps) - 1) % tokens_per_step + 1
            assert sorted(ages) == list(range(min(len(steps), capacity - tokens_per_step + begun)))
            for slot in visible_BS[stream].nonzero()[:, 0].tolist():
                expected = steps[-1 - int(distance_BS[stream, slot])]
                assert torch.equal(kv_2BHSE[:, stream, :, slot], expected)
        cache.advance()


def test_cache_has_the_kind_of_its_model() -> None:
    cache = KVCache.empty(layers=1, streams=2, heads=1, capacity=3, d_head=1, like=torch.zeros(1, dtype=torch.float16))
    assert cache.kv_L2BHSE.dtype == torch.float16
    assert (cache.capacity, cache.length_B.tolist()) == (3, [0, 0])


def test_attention_step_by_step_equals_attention_at_once() -> None:
    steps, d_model = 6, HEADS * E
    attention = randomise(Attention(d_model, HEADS, dropout=0.0, utility=True).double(), 0)
    generator = torch.Generator().manual_seed(1)
    x, rho, g = (torch.randn(STREAMS, steps, d_model, dtype=torch.float64, generator=generator) for _ in range(3))
    cache, found = empty(steps), []
    for t in range(steps):
        found.append(attention.step(x[:, t], rho[:, t], g[:, t], cache, 0, cache.window()))
        cache.advance()
    torch.testing.assert_close(torch.stack(found, 1), attention(x, rho, g), rtol=0, atol=1e-12)


# ---------------------------------------------------------------- through whole policies


def cache_of(state: Any) -> KVCache:
    return state if isinstance(state, KVCache) else state.cache


@torch.no_grad()
def stream_over(policy: Policy, filling: float, spare: int = 3) -> Tensor:
    """Logits of a stream whose cache is larger than needed, and filled with this number."""
    batch = random_batch(policy.spec)
    streams, steps = batch.valid.shape
    state, logits = policy.init_state(streams, steps + spare, "cpu"), []
    cache_of(state).kv_L2BHSE.fill_(filling)
    for moment in moments(batch):
        logits_BA, state = policy.step(state, moment)
        logits.append(logits_BA)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["vanilla", "uat"])
def test_slots_past_the_length_are_never_read(method: str, dtype: torch.dtype) -> None:
    policy = build_random(method, SPECS["vector-discrete"], dtype=dtype, max_positions=20)
    assert torch.equal(stream_over(policy, POISON), stream_over(policy, 0.0))


@pytest.mark.parametrize("method", ["vanilla", "gtrxl", "uat"])
def test_a_slot_inside_the_length_is_read(method: str) -> None:
    """Negative control: huge numbers in slots of the past do change the present."""
    policy = build_random(method, SPECS["vector-discrete"])
    batch = random_batch(policy.spec)
    state = policy.init_state(len(batch.obs), policy.spec.steps, "cpu")
    told = list(moments(batch))
    with torch.no_grad():
        _, state = policy.step(state, told[0])
        clean, state = policy.step(state, told[1])
        cache_of(state).kv_L2BHSE[..., 0, :] = POISON
        cache_of(state).length_B -= 1
        dirty, _ = policy.step(state, told[1])
    assert not torch.equal(clean, dirty)


@pytest.mark.parametrize("method", ["vanilla", "gtrxl", "uat"])
def test_restarted_streams_forget_what_still_lies_in_their_slots(method: str) -> None:
    policy = build_random(method, SPECS["vector-discrete"])
    old, anew = (list(moments(random_batch(policy.spec, seed=seed))) for seed in (1, 2))
    state = policy.init_state(3, policy.spec.steps, "cpu")
    fresh_state = policy.init_state(3, policy.spec.steps, "cpu")
    with torch.no_grad():
        for moment in old:
            _, state = policy.step(state, moment)
        for moment in anew:
            found, state = policy.step(state, moment)
            expected, fresh_state = policy.step(fresh_state, moment)
            assert torch.equal(found, expected)
