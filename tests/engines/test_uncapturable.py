"""A world that cannot be captured: said in a sentence, and played launch by launch."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from uat.contracts import Transition
from uat.domains.darkroom import DarkRoomConfig
from uat.domains.darkroom.world import DarkRoomSimulator, World
from uat.engines import graph
from uat.engines.rollout import RolloutRunner


def test_a_failed_capture_warns_and_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object, *, preserve: object = ()) -> None:
        raise graph.CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "Captured", fail)
    with pytest.warns(
        UserWarning, match=r"the rollout cannot be captured .* \(operation not permitted .* launch by launch"
    ):
        assert graph.captured_or_none(lambda: 1, "the rollout") is None


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    """The end of an older graph, found among the garbage, would spoil the recording."""
    with graph._without_garbage_collection():  # pyright: ignore[reportPrivateUsage]
        assert not gc.isenabled()
    assert gc.isenabled()


class Curious(DarkRoomSimulator):
    """Reads a value back to the host."""

    def step(self, world: World, action: torch.Tensor) -> Transition[World]:
        assert action.max().item() < 5
        return super().step(world, action)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_world_that_reads_values_back_is_played_launch_by_launch() -> None:
    config, device = DarkRoomConfig(horizon=6), torch.device("cuda")
    player = RolloutRunner(None, Curious(config, device), device=device, sampled=False)
    with pytest.warns(UserWarning, match="the rollout cannot be captured"):
        first = player.play(torch.arange(8), seed=3)
    assert player.path.startswith("cuda eager, no graph")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        again = player.play(torch.arange(8), seed=3)
    plain = RolloutRunner(None, DarkRoomSimulator(config, device), device=device, sampled=False).play(
        torch.arange(8), seed=3
    )
    assert torch.equal(first.obs, plain.obs)
    assert torch.equal(again.obs, plain.obs)
