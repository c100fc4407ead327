"""CUDA streams for concurrent graphs: each graph has its own stream, and a shared stream comes with a warning."""

from __future__ import annotations

import itertools
import weakref

import pytest

from uat.engines import graph
from uat.engines.graph import own_stream

COUNT = 4


class Stream:
    """A stand-in for torch's streams without a device: a few streams, handed out in turn. They have no `__weakref__`,
    since weak references to torch's streams can crash Python."""

    __slots__ = ("__dict__", "cuda_stream", "device_index")
    turn = itertools.count()

    def __init__(self, device: object = None) -> None:
        self.device_index, self.cuda_stream = 0, next(Stream.turn) % COUNT


@pytest.fixture(autouse=True)
def few_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(graph, "STREAMS", COUNT)
    monkeypatch.setattr(graph, "_held", weakref.WeakValueDictionary())


def test_nobody_shares_a_stream_that_is_held() -> None:
    first = own_stream()
    for _ in range(3 * COUNT):  # held for a moment each
        assert own_stream().cuda_stream != first.cuda_stream
    held = [first, *(own_stream() for _ in range(COUNT - 1))]
    assert len({stream.cuda_stream for stream in held}) == COUNT


def test_those_of_graphs_that_nobody_can_reach_are_free_again() -> None:
    for _ in range(COUNT):
        graph: list[object] = [own_stream()]
        graph.append(graph)  # as a graph and the function that it keeps alive
        del graph
    own_stream()


def test_where_there_are_no_more_a_warning_says_so() -> None:
    held = [own_stream() for _ in range(COUNT)]
    with pytest.warns(UserWarning, match="all 4 streams of the device are in use"):
        own_stream()
    held.clear()
    own_stream()
