"""CUDA graphs: hundreds of small launches recorded once and replayed as one; streams, and copies to the host."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
STREAMS = 32
"""Streams that torch has on a device; it hands them out in turn."""


class CaptureError(RuntimeError):
    """What should be recorded does something that cannot be."""


class Captured(Generic[Result]):
    """A function without arguments whose tensors keep their addresses, recorded as a CUDA graph.

    Its inputs are changed by writing into the same tensors; what it returns are the same tensors each time.
    Warm-up really runs the function: tensors that it changes (weights, optimizer state) are named in
    `preserve` and put back.

    Each is recorded on a stream of its own. Libraries of matrix products keep a workspace for each stream: graphs
    recorded on one stream share it, and write over each other's sums when they are replayed side by side.
    """

    def __init__(self, function: Callable[[], Result], *, preserve: Iterable[Tensor] = ()) -> None:
        self.function = function  # keeps alive what the graph reads
        before = [(tensor, tensor.detach().clone()) for tensor in preserve]
        self.stream = stream = own_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with _nothing_collected(), torch.cuda.graph(self.graph, stream=stream):
                self.result = function()
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        # Also at the end of a program, while the device is: graphs lie in cycles, which Python breaks up last of all.
        self._reset = weakref.finalize(self, self.graph.reset)

    def __call__(self) -> Result:
        self.graph.replay()
        return self.result

    def close(self) -> None:
        """Give back the graph, its memory and its stream, once what was replayed on this stream is done. Left to
        itself all that stays until Python looks for cycles, and a training that finds no stream free has it look."""
        with contextlib.suppress(RuntimeError):  # whatever broke the device is told where it happened
            torch.cuda.current_stream().synchronize()
        self._reset()
        del self.function, self.result, self.graph, self.stream


class SerialReplay:
    """Graphs of several streams that are replayed one after another, in the order in which they are handed over. The
    device waits for the one before, the host does not."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def __call__(self, captured: Captured[Result]) -> Result:
        stream = torch.cuda.current_stream()
        if self._last is not None:
            stream.wait_event(self._last)
        result = captured()
        self._last = torch.cuda.Event()
        self._last.record(stream)
        return result


class _Lease:
    """Lies in a stream that somebody owns, and goes with it. Torch's streams tell no weak reference that they go: one
    of them pointed to memory of something else afterwards, and Python crashed at its end."""


_held: weakref.WeakValueDictionary[tuple[int, int], _Lease] = weakref.WeakValueDictionary()
"""Leases of the streams that somebody owns, by device and handle."""


def own_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """A stream that is nobody else's as long as it is held; if torch has no more, a warning, and one that is shared."""
    for look in range(2):
        for stream in (torch.cuda.Stream(device) for _ in range(STREAMS)):
            at = (stream.device_index, stream.cuda_stream)
            if at not in _held:
                _held[at] = vars(stream)["lease"] = _Lease()
                return stream
        if look == 0:
            gc.collect()  # graphs lie in cycles with what they call: those of trainings that are over hold theirs still
    warnings.warn(
        f"all {STREAMS} streams of the device are in use, and graphs that share one must not run side by side: "
        "train fewer at a time",
        stacklevel=2,
    )
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage stays: an older graph that is destroyed while another is recorded makes the recording fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def captured_or_none(
    function: Callable[[], Result], what: str, *, preserve: Iterable[Tensor] = ()
) -> Captured[Result] | None:
    """The function recorded; if that cannot be, a warning that says so, and None: whoever asked calls it plainly."""
    try:
        return Captured(function, preserve=preserve)
    except CaptureError as error:
        warnings.warn(
            f"{what} cannot be captured as a CUDA graph ({error}); it runs launch by launch, which is much slower: "
            "nothing in it may read a value back to the host or depend on one",
            stacklevel=2,
        )
        return None


def copy_to_host(rows: list[dict[str, Any]]) -> Callable[[], list[dict[str, Any]]]:
    """Begin to copy the numbers of rows that lie on a device to the host, all of one type in one copy.

    The function that is returned waits for these copies, and for nothing that the device is given later.
    """
    places: dict[Any, list[tuple[int, str]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, Tensor):
                places.setdefault((value.dtype, value.device), []).append((index, name))
    copies: list[Tensor] = []
    for its in places.values():
        numbers = torch.stack([rows[index][name].detach().reshape(()) for index, name in its])
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        copies.append(on_host.copy_(numbers, non_blocking=numbers.is_cuda))
    there: list[torch.cuda.Event] = []
    for device in {device for _, device in places if device.type == "cuda"}:
        there.append(torch.cuda.Event())
        there[-1].record(torch.cuda.current_stream(device))

    def read() -> list[dict[str, Any]]:
        for event in there:
            event.synchronize()
        found = [dict(row) for row in rows]
        for its, numbers in zip(places.values(), copies, strict=True):
            for (index, name), number in zip(its, numbers.tolist(), strict=True):
                found[index][name] = number
        return found

    return read
