"""Compile kernels in parallel before they are launched.

Triton compiles a kernel at its first launch, and the launch waits: one after another, the kernels of a training take
most of a minute. Instead, the function to be captured runs once with its launches recorded but not executed, and
threads then compile all kernels in parallel. Triton's compiler releases Python's global lock meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from uat.engines.kernels import compiles
from uat.threads import cores

MOST_THREADS = 16
EMPTY = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}

_warmed_up: set[Hashable] = set()
"""Devices and keys that have been warmed up in this process."""
_one_at_a_time = threading.Lock()
"""Held while launches are recorded: the replacement of Triton's launch function affects all threads."""


class Launch(NamedTuple):
    """A recorded launch: a kernel and its arguments. Aligned tensors are replaced by empty ones."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def compilation(self) -> Hashable:
        """Key of the compilation that this launch needs; launches with equal keys share one."""
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        given = dict(zip(parameters, self.args, strict=False)) | self.named
        keys = ((name, _compilation_key(value, parameters.get(name))) for name, value in sorted(given.items()))
        return id(self.kernel), tuple(keys)

    def name_functions(self) -> None:
        """Make Triton compute the names of all functions in the kernel.

        A name includes the constants only of those functions that already have names. In threads, that order would be
        random, and Triton would not find the kernel in its cache again.
        """
        for value in (*self.args, *self.named.values(), self.kernel):
            getattr(value, "cache_key", None)


def warm_up(
    prepare: Callable[[], Callable[[], object]], device: torch.device, key: Hashable, preserve: Iterable[Tensor]
) -> None:
    """Compile the kernels that a function would launch, once for each key.

    prepare: returns that function, after real work that must not run on zeros, such as drawing noise.
    preserve: tensors that the function changes; they are restored. The function must not keep other kernel results.

    The function runs without its Triton kernels, whose outputs are zeros. If the function or a compilation fails, the
    kernels are compiled at their launch instead.
    """
    if not compiles(device) or not _compiles_in_parallel():
        return
    if device.type == "cuda" and device.index is None:  # threads have a current device of their own
        device = torch.device(device.type, torch.cuda.current_device())
    if (device, key) in _warmed_up:
        return
    _warmed_up.add((device, key))
    function = prepare()
    before = [(tensor, tensor.detach().clone()) for tensor in preserve]
    with record_launches() as launches, contextlib.suppress(Exception):
        function()
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)
    with contextlib.suppress(Exception):
        compile_all(launches, device)


def compile_all(launches: Iterable[Launch], device: torch.device) -> None:
    """Run each different compilation once, in parallel. Failures are ignored: the launch will raise the error."""
    different = {launch.compilation: launch for launch in launches}
    for launch in different.values():
        launch.name_functions()

    def warm(launch: Launch) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.named)

    with ThreadPoolExecutor(min(MOST_THREADS, cores())) as threads:
        list(threads.map(warm, different.values()))


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Record the launches of Triton kernels without executing them, on this thread and in its backward passes.

    Launches of other threads are executed. New memory is filled with zeros, since unwritten values may be used as
    indices. A kernel with Triton's autotuner raises an error: tuning needs real launches.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    zeros, launches = _Zeros(), list[Launch]()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not zeros.active_here():
            return run(self, *args, grid=grid, warmup=warmup, **named)
        launches.append(Launch(self, grid, _light(args), {name: _light(value) for name, value in named.items()}))
        return None

    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        if zeros.active_here():
            raise RuntimeError(f"{self.base_fn.__name__} is tuned at its launch, which cannot be warmed up")
        return tune(self, *args, **named)

    with _one_at_a_time:
        run, tune = JITFunction.run, Autotuner.run
        JITFunction.run, Autotuner.run = note, refuse  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with zeros:
                yield launches
        finally:
            JITFunction.run, Autotuner.run = run, tune  # pyright: ignore[reportAttributeAccessIssue]


class _Zeros(TorchDispatchMode):
    """Mode in which new memory is filled with zeros. It also applies to the threads of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._here.seen = True
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func._schema.name in EMPTY else out

    def active_here(self) -> bool:
        """Whether the mode is active on this thread."""
        self._here.seen = False
        torch.empty(0)
        return self._here.seen


def _compiles_in_parallel() -> bool:
    """Whether this version of Triton can compile in several threads: those with `AsyncCompileMode` can."""
    import triton

    return hasattr(triton, "AsyncCompileMode")


def _light(value: Any) -> Any:
    """Replace aligned tensors by empty ones, to free their memory."""
    if isinstance(value, tuple):
        parts = [_light(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor) and value.data_ptr() % 16 == 0:
        return torch.empty(0, dtype=value.dtype, device=value.device)
    return value


def _compilation_key(value: Any, parameter: Any) -> Hashable:
    """Return the part of a value that its compilation depends on: constants and settings entirely; of other integers,
    whether they are 1 or a multiple of 16, unless Triton must not specialize on them."""
    if isinstance(value, tuple):
        return tuple(_compilation_key(part, parameter) for part in value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter is None or parameter.is_constexpr or not isinstance(value, int):
        return value
    return "number" if parameter.do_not_specialize else (value == 1, value % 16 == 0, value.bit_length() < 32)
