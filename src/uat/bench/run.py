"""Run the benchmark: measure every case of the options on one device, and return rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from uat.bench import apart, losses
from uat.bench.cases import EPOCHS, FULL, QUICK, SEEDS, Training, settings, together, training_call, training_paths
from uat.bench.options import Bench
from uat.bench.peers import PEERS
from uat.bench.steps import Stepping
from uat.bench.timing import Call, Row, measure, numpy_obeys, quantile, threads
from uat.training.surroundings import pick_device, precision

STEP_CALLS = 20
"""Factor of the number of timed calls for single steps, which are short."""
ORDER = ("cold", "rollout", "optimize", "epoch", "together", "step", "memory", "loss")
"""Order of the cases: the cold start must come first."""

Calls = dict[tuple[str, str, int], Call]
"""By (method, path, context)."""


@dataclass(slots=True)
class Result:
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Paths that could not be measured -> reason -> cases."""


def bench(
    options: Bench, say: Callable[[str], None] = lambda line: None, keep: Callable[[Result], None] = lambda result: None
) -> Result:
    """Run the benchmark. `say` receives a line after every measurement, `keep` the result so far after each case."""
    return Running(options, say, keep).run()


class Running:
    def __init__(self, options: Bench, say: Callable[[str], None], keep: Callable[[Result], None]) -> None:
        self.options, self.say, self.keep, self.device = options, say, keep, pick_device(options.device)
        if options.precision != "fp32" and self.device.type != "cuda":
            raise ValueError(f"precision {options.precision!r} is for CUDA; use precision 'fp32' on a CPU")
        self.sizes = QUICK if options.quick else FULL
        self.configs = {m: settings(m, self.sizes, options.precision) for m in dict.fromkeys(options.methods)}
        self.result = Result()

    def run(self) -> Result:
        for case in sorted(set(self.options.cases), key=ORDER.index):
            with precision(self.options.precision), threads(self._threads(case)):
                match case:
                    case "step":
                        self._steps()
                    case "together":
                        self._together()
                    case "loss":
                        self._losses()
                    case "memory" | "cold":
                        self._apart(case)
                    case _:
                        self._training(case)
            self.keep(self.result)
        return self.result

    # ------------------------------------------------------------ cases

    def _training(self, case: str) -> None:
        calls: Calls = {}
        for method, config in self.configs.items():
            for path in training_paths(self.device):
                training = Training(config, path, self.device)
                if training.reason is not None:
                    self._miss(path, training.reason, f"{case} of {method}")
                elif (call := training_call(case, training)) is not None:
                    calls[method, path, self.sizes.context] = call
        self._time(case, self.sizes.batch, calls, self.options.repeats)

    def _together(self) -> None:
        """Time one seed and three seeds in alternation; the metric names the number of seeds."""
        for method, config in self.configs.items():
            if self.device.type != "cuda":
                self._miss("fast", "seeds side by side need CUDA; on a CPU they take turns", f"together of {method}")
                continue
            calls: dict[str, Call] = {}
            for metric, seeds in (("one seed", 1), ("three seeds", SEEDS)):
                call = together(config, seeds, self.device)
                if isinstance(call, str):
                    self._miss("fast", call, f"together of {method}")
                else:
                    calls[metric] = call
            self.say(f"together: {method}: timing one seed and {SEEDS} in turns")
            for metric, times in measure(calls, self.options.repeats, self.device).items():
                value = quantile(times, 0.5) / EPOCHS
                self._add("together", method, "fast", self.sizes.batch, self.sizes.context, metric, value, "ms")
                self.say(f"together: {method}, {metric}: {value:.4g} ms, median of {len(times)}")

    def _steps(self) -> None:
        """Time all contexts of a batch size in alternation, so that growth with context is a fair comparison."""
        sizes = self.sizes.steps()
        for batch in dict.fromkeys(batch for batch, _ in sizes):
            calls: Calls = {}
            for context in (context for other, context in sizes if other == batch):
                self.say(f"step: batch {batch}: filling {context} steps of context")
                for (method, path), call in self._step_calls(batch, context):
                    where = f"step of {method} at batch {batch} context {context}"
                    if isinstance(call, str):
                        self._miss(path, call, where)
                    else:
                        calls[method, path, context] = call
            self._time("step", batch, calls, STEP_CALLS * self.options.repeats)

    def _step_calls(self, batch: int, context: int) -> Iterator[tuple[tuple[str, str], Call | str]]:
        """Calls by (method, path), then those of the peers by (library, path), each once."""
        for method, config in self.configs.items():
            for path, call in Stepping(config, batch, context, self.device).calls():
                yield (method, path), call
        config = next(iter(self.configs.values()))
        for name, (library, build) in PEERS.items():
            spec = config.build_domain().spec
            yield (library, f"peer:{name}"), build(spec, config.method, batch, context, self.device)

    def _losses(self) -> None:
        """Time the loss, which belongs to no method: the number of items takes the method's place in the rows."""
        batch, context = self.sizes.rows
        for items in self.sizes.items:
            name, calls, peaks = f"{items} items", {}, {}
            for path in losses.PATHS:
                if reason := losses.unsupported_reason(path, batch * context, items, self.device):
                    self._miss(path, reason, f"loss over {name}")
                    continue
                loss = losses.Loss(path, batch * context, items, self.device)
                calls[name, path, context] = Call(loss.run)
                peaks[path] = losses.peak(loss, self.device)
            self._time("loss", batch, calls, self.options.repeats)
            for path, value in peaks.items():
                if value is None:
                    self._miss(path, "torch reports no peak memory on a CPU", f"memory of the loss over {name}")
                else:
                    self._add("loss", name, path, batch, context, "peak", value, "MiB")

    def _apart(self, case: str) -> None:
        for method, config in self.configs.items():
            measure_case = apart.memory if case == "memory" else apart.cold
            for path, batch, context, metric, value, unit in measure_case(config, self.sizes, self.device):
                if isinstance(value, str):
                    self._miss(path, value, f"{case} of {method}")
                    continue
                self._add(case, method, path, batch, context, metric, value, unit)
                self.say(f"{case}: {method}, {path}, batch {batch}, context {context}: {metric} {value:.4g} {unit}")

    # ------------------------------------------------------------ rows

    def _time(self, case: str, batch: int, calls: Calls, repeats: int) -> None:
        """Time calls that are compared with each other, in alternation, and add their rows."""
        self.say(f"{case}: batch {batch}: timing {len(calls)} paths in turns")
        timings = measure(calls, repeats, self.device, seconds=1.0 if self.options.quick else 10.0)
        for (method, path, context), times in timings.items():
            for metric, q in (("p50", 0.5), ("p99", 0.99)):
                self._add(case, method, path, batch, context, metric, quantile(times, q), "ms")
            p50, count = self.result.rows[-2].value, len(times)
            self.say(f"{case}: {method}, {path}, batch {batch}, context {context}: {p50:.4g} ms, median of {count}")

    def _add(
        self, case: str, method: str, path: str, batch: int, context: int, metric: str, value: float, unit: str
    ) -> None:
        place = {"device": self._device_name(case), "case": case, "method": method, "path": path, "metric": metric}
        exact = float(f"{value:.5g}")
        self.result.rows.append(Row(**place, batch=batch, context=context, value=exact, unit=unit))

    def _miss(self, path: str, why: str, where: str) -> None:
        places = self.result.absent.setdefault(path, {}).setdefault(why, [])
        if not places:
            self.say(f"{path} is not measured: {why}")
        if where not in places:
            places.append(where)

    def _threads(self, case: str) -> int:
        """CPU threads of a case: one for latency, all cores for throughput."""
        return self.options.threads or (1 if case == "step" else torch.get_num_threads())

    def _device_name(self, case: str) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        count = torch.get_num_threads()
        limit = "" if case != "step" or numpy_obeys(count) else " (numpy: its own)"
        return f"CPU, {count} thread{'s' if count > 1 else ''}{limit}"
