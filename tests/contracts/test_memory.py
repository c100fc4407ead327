"""The memory of every method is a value: streams are taken out, put elsewhere, and go on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch

from tests.builders import CPU, SPECS, build_random, moments, random_batch, served
from uat.contracts import Memory, stream_axis
from uat.methods import METHODS
from uat.methods.uat import UATState
from uat.methods.vanilla import Vanilla

ROWS = torch.tensor([2, 0])
every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@torch.no_grad()
def test_streams_that_are_taken_and_put_go_on_as_before(method: str) -> None:
    spec = served(method)
    policy, batch = build_random(method, spec), random_batch(spec, episodes=4, whole=True)
    told = list(moments(batch))
    state = policy.init_state(4, spec.steps, CPU)
    for moment in told[:3]:
        _, state = policy.step(state, moment)
    assert isinstance(state, Memory)
    few = state.take(ROWS)
    other = policy.init_state(5, spec.steps, CPU)
    for moment in moments(random_batch(spec, episodes=5, seed=7, steps=2, whole=True)):
        _, other = policy.step(other, moment)
    places = torch.tensor([1, 4])
    other.put(places, few)
    for moment in told[3:6]:
        whole_BA, state = policy.step(state, moment)
        few_BA, few = policy.step(few, moment.map(lambda x: x[ROWS]))
        spread = moment.map(lambda x: x[torch.tensor([0, 2, 0, 0, 0])])
        put_BA, other = policy.step(other, spread)
        torch.testing.assert_close(few_BA, whole_BA[ROWS], rtol=0, atol=1e-10)
        torch.testing.assert_close(put_BA[places], whole_BA[ROWS], rtol=0, atol=1e-10)


@every_method
def test_a_memory_holds_no_weights_and_says_where_its_streams_are(method: str) -> None:
    spec = served(method)
    policy = build_random(method, spec)
    state = policy.init_state(3, spec.steps, CPU)
    assert isinstance(state, Memory)
    weights = {x.data_ptr() for x in [*policy.parameters(), *policy.buffers()] if x.numel()}
    streams = 0
    for name, x in state.tensors().items():
        assert x.data_ptr() not in weights or not x.numel(), name
        axis = stream_axis(name.removesuffix(f".{name.rpartition('.')[2]}") if name[-1].isdigit() else name)
        if axis is not None:
            assert x.shape[axis] == 3, name
            streams += 1
    assert streams


def test_what_is_taken_is_a_copy() -> None:
    spec = SPECS["vector-discrete"]
    policy = build_random("uat", spec)
    state = policy.init_state(3, spec.steps, CPU)
    assert isinstance(state, UATState)
    taken = state.take(torch.tensor([1]))
    taken.ubar_BU.fill_(5)
    taken.cache.length_B.fill_(7)
    assert state.ubar_BU.abs().max() == 0
    assert state.cache.length_B.tolist() == [0, 0, 0]
    assert list(state.tensors()) == ["cache.kv_L2BHSE", "cache.length_B", "ubar_BU"]
    assert isinstance(build_random("vanilla", spec), Vanilla)
