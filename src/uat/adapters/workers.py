"""Environments stepped by several processes, with the same results as in one.

Stream i belongs to worker i % N. All workers step at the same time; their results are put together in the order of the
streams.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from uat.adapters.environments import Results, Rules, Stepping
from uat.adapters.sources import Source, in_words, unshared_spec
from uat.adapters.spaces import Values

PATIENCE = 5.0
"""Seconds in which a worker may close its environments before it is killed."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that keep a worker to one thread, unless the user has set them."""


class Worker:
    """A process that steps environments."""

    def __init__(self, label: str, payload: bytes) -> None:
        self.label = label
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        surroundings = {**dict.fromkeys(THREADS, "1"), **os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-m", "uat.adapters.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings)
        self._end = weakref.finalize(self, _end, self.process)
        self._write(sys.path)
        self.send("open", payload)

    def send(self, what: str, *arguments: Any) -> None:
        self._write((what, *arguments))

    def receive(self) -> Any:
        """Return the answer to the oldest request; raise the error that it caused."""
        assert self.process.stdout is not None
        try:
            answer = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self) -> None:
        self._end()

    def _write(self, message: Any) -> None:
        assert self.process.stdin is not None
        try:
            pickle.dump(message, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _ended(self) -> ValueError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        return ValueError(
            f"{self.label}: a process that steps environments has ended by itself (exit code "
            f"{self.process.returncode}), as when an environment crashes or memory runs out: see its messages above, "
            "or set domain.workers=0 to step in one process"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the process's input, which ends it; kill it if it does not end soon. Leave no zombie."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class WorkerEnvironments(Stepping):
    """Environments of which each of several processes steps a share."""

    def __init__(self, source: Source, rules: Rules, spaces: tuple[Any, Any], workers: int) -> None:
        self.source, self.rules, self.spaces, self.count = source, rules, spaces, workers
        self.workers: list[Worker] = []

    def reset(self, seeds: Sequence[int]) -> Results:
        if not self.workers:
            payload = self._payload()
            with self._ending_all():
                for _ in range(self.count):
                    self.workers.append(Worker(self.source.label, payload))
                for worker in self.workers:
                    worker.receive()
        shares = [list(seeds[i :: self.count]) for i in range(self.count)]
        busy = [i for i, share in enumerate(shares) if share]
        begun = time.perf_counter()
        answers = self._asked({i: ("reset", shares[i]) for i in busy})
        masked = {i: answers[i].allowed is not None for i in busy}
        if any(masked.values()) and not all(masked.values()):
            answers |= self._asked({i: ("give_masks",) for i in busy if not masked[i]})
        order = [np.arange(i, len(seeds), self.count) for i in busy]
        return self._together([answers[i] for i in busy], order, begun)

    def step(self, streams: Sequence[int], actions: Values) -> Results:
        numbers = np.asarray(streams)
        places = {i: np.flatnonzero(numbers % self.count == i) for i in range(self.count)}
        places = {i: own for i, own in places.items() if len(own)}
        begun = time.perf_counter()
        requests = {i: ("step", (numbers[own] // self.count).tolist(), actions[own]) for i, own in places.items()}
        answers = self._asked(requests)
        return self._together(list(answers.values()), list(places.values()), begun)

    def close(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        for worker in workers:
            worker.close()

    def _asked(self, requests: dict[int, tuple[Any, ...]]) -> dict[int, Results]:
        """Send a request to each of these workers, and return the answers."""
        with self._ending_all():
            for i, request in requests.items():
                self.workers[i].send(*request)
            return {i: self.workers[i].receive() for i in requests}

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """After an error or an interrupt, end all workers: the next reset starts others."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _payload(self) -> bytes:
        import cloudpickle

        try:
            return cloudpickle.dumps((unshared_spec(self.source), (self.source, self.rules, self.spaces)))
        except Exception as error:  # whatever objects of the user's raise
            raise ValueError(
                f"{self.source.label} cannot be sent to other processes ({in_words(error)}): pass a factory, such as "
                "lambda: MyEnv(), or set domain.workers=0"
            ) from None

    @staticmethod
    def _together(parts: list[Results], places: list[Values], begun: float) -> Results:
        """Return the results of all streams in their order."""
        order = np.argsort(np.concatenate(places), kind="stable")

        def joined(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])[order]

        names = ["obs", "reward", "terminated", "truncated", "success"]
        names += ["allowed"] if parts[0].allowed is not None else []
        return replace(parts[0], **{name: joined(name) for name in names}, seconds=time.perf_counter() - begun)
