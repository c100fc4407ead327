"""CUDA graphs (hundreds of small launches recorded once and replayed as one), CUDA streams, and copies to the host."""

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
"""CUDA streams that torch has per device; torch hands them out in turn."""


class CaptureError(RuntimeError):
    """A function cannot be captured as a CUDA graph."""


class Captured(Generic[Result]):
    """A function without arguments whose tensors keep their addresses, recorded as a CUDA graph.

    To change its inputs, write into the same tensors; it returns the same tensors each time. Warm-up runs the function
    three times, so tensors that the function changes (weights, optimizer state) are passed as `preserve` and restored.

    Each graph is recorded on its own stream. Matrix product libraries keep one workspace per stream, so graphs recorded
    on the same stream would share it and overwrite each other's sums when replayed concurrently.
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
            with _without_garbage_collection(), torch.cuda.graph(self.graph, stream=stream):
                self.result = function()
        except RuntimeError as error:
            torch.cuda.synchronize()
            raise CaptureError(str(error).strip().split("\n")[0]) from error
        # Also reset at exit, while the device still exists: graphs are in reference cycles, which Python frees last.
        self._reset = weakref.finalize(self, self.graph.reset)

    def __call__(self) -> Result:
        self.graph.replay()
        return self.result

    def close(self) -> None:
        """Wait for replays on this stream, then free the graph, its memory and its stream.

        Without this call they stay allocated until Python's garbage collector runs, which `own_stream` triggers when no
        stream is free.
        """
        with contextlib.suppress(RuntimeError):  # an error of the device is raised where it happened
            torch.cuda.current_stream().synchronize()
        self._reset()
        del self.function, self.result, self.graph, self.stream


class SerialReplay:
    """Replay graphs of several streams one after another, in the order of the calls. The device waits for the previous
    graph; the host does not."""

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
    """Attribute of an owned stream, freed with the stream. Weak references to torch's streams are not safe: they are
    not cleared when the stream is freed, and one made Python crash at exit."""


_held: weakref.WeakValueDictionary[tuple[int, int], _Lease] = weakref.WeakValueDictionary()
"""Leases of the streams in use, by device and handle."""


def own_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """Return a stream that no other caller holds; if torch has none left, warn and return a shared one."""
    for attempt in range(2):
        for stream in (torch.cuda.Stream(device) for _ in range(STREAMS)):
            at = (stream.device_index, stream.cuda_stream)
            if at not in _held:
                _held[at] = vars(stream)["lease"] = _Lease()
                return stream
        if attempt == 0:
            gc.collect()  # graphs of finished trainings are in reference cycles and still hold their streams
    warnings.warn(
        f"all {STREAMS} streams of the device are in use, and graphs that share one must not run side by side: "
        "train fewer at a time",
        stacklevel=2,
    )
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: destroying an older graph while another is recorded makes the recording fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def captured_or_none(
    function: Callable[[], Result], what: str, *, preserve: Iterable[Tensor] = ()
) -> Captured[Result] | None:
    """Capture a function; if that fails, warn and return None, and the caller runs the function launch by launch."""
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
    """Start copying the tensors in rows to the host, with one copy per dtype and device.

    The returned function waits for these copies only, not for later work of the device, and returns the rows.
    """
    places: dict[Any, list[tuple[int, str]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, Tensor):
                places.setdefault((value.dtype, value.device), []).append((index, name))
    copies: list[Tensor] = []
    for entries in places.values():
        numbers = torch.stack([rows[index][name].detach().reshape(()) for index, name in entries])
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        copies.append(on_host.copy_(numbers, non_blocking=numbers.is_cuda))
    events: list[torch.cuda.Event] = []
    for device in {device for _, device in places if device.type == "cuda"}:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))

    def read() -> list[dict[str, Any]]:
        for event in events:
            event.synchronize()
        result = [dict(row) for row in rows]
        for entries, numbers in zip(places.values(), copies, strict=True):
            for (index, name), number in zip(entries, numbers.tolist(), strict=True):
                result[index][name] = number
        return result

    return read
