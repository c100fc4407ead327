"""Kernels compiled side by side, before they are launched.

Triton compiles a kernel when it is first launched, and the launch waits: one after another, those of a training take
most of a minute. So what will be captured runs once before, with each launch recorded instead of made, and then all of
them are compiled at once, by threads. Triton's compiler leaves Python alone meanwhile.
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
"""What has been warmed up in this process."""
_one_at_a_time = threading.Lock()
"""Held while launches are recorded: what stands in for Triton's own launch is one for all threads."""


class Launch(NamedTuple):
    """A kernel and what it was to be launched with; of tensors, unless they lie askew, only what is compiled in."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def compilation(self) -> Hashable:
        """Launches in which this is the same need one compilation."""
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        given = dict(zip(parameters, self.args, strict=False)) | self.named
        told = ((name, _compiled_in(value, parameters.get(name))) for name, value in sorted(given.items()))
        return id(self.kernel), tuple(told)

    def name_functions(self) -> None:
        """Have Triton work out the names of all functions in it. A name holds constants of those functions alone that
        had theirs before: left to threads it would be chance, and what lies in Triton's cache not be found again."""
        for value in (*self.args, *self.named.values(), self.kernel):
            getattr(value, "cache_key", None)


def warm_up(
    prepare: Callable[[], Callable[[], object]], device: torch.device, key: Hashable, preserve: Iterable[Tensor]
) -> None:
    """Have compiled what a function would launch, once for each key.

    prepare: gives that function, and does for real what must not happen on zeros, as drawing noise. The function runs
    but for its Triton kernels, on zeros where they would have written. Tensors that it changes are named in `preserve`
    and put back; it may keep nothing else that kernels wrote. Where it fails, or a compilation does, nothing is lost:
    kernels are compiled when they are launched.
    """
    if not compiles(device) or not _side_by_side():
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
    """Each compilation once, several at a time. One that fails is left for the launch, which will say why."""
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
    """Record launches of Triton kernels in here, and in backward passes from here, and do not make them; those of other
    threads are made. New memory is filled with zeros: what nobody has written may be an index. A kernel that
    Triton tunes is an error: it would choose by launches that are not made."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    zeros, launches = _Zeros(), list[Launch]()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not zeros.rule_here():
            return run(self, *args, grid=grid, warmup=warmup, **named)
        launches.append(Launch(self, grid, _light(args), {name: _light(value) for name, value in named.items()}))
        return None

    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        if zeros.rule_here():
            raise RuntimeError(f"{self.base_fn.__name__} is tuned where it is launched, which cannot be warmed up")
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
    """New memory is zeros. Backward passes take it along to their own threads."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._here.seen = True
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func._schema.name in EMPTY else out

    def rule_here(self) -> bool:
        """Whether this thread is under it."""
        self._here.seen = False
        torch.empty(0)
        return self._here.seen


def _side_by_side() -> bool:
    """Whether this Triton's compiler takes several kernels at a time: one that has a mode for it does."""
    import triton

    return hasattr(triton, "AsyncCompileMode")


def _light(value: Any) -> Any:
    """Without a tensor's memory, which the warm-up need not keep."""
    if isinstance(value, tuple):
        parts = [_light(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor) and value.data_ptr() % 16 == 0:
        return torch.empty(0, dtype=value.dtype, device=value.device)
    return value


def _compiled_in(value: Any, parameter: Any) -> Hashable:
    """What a compilation knows of a value: all of a constant or a setting, and of other numbers whether they are 1 or a
    multiple of 16, unless they are to stay plain."""
    if isinstance(value, tuple):
        return tuple(_compiled_in(part, parameter) for part in value)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter is None or parameter.is_constexpr or not isinstance(value, int):
        return value
    return "number" if parameter.do_not_specialize else (value == 1, value % 16 == 0, value.bit_length() < 32)
