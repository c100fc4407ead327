"""The single step: one decision in every stream, at a given context length.

Observations, actions and rewards repeat those of an expert's episodes. A policy's step is called with a filled memory;
the call resets the memory's counters, so that every call sees the same context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from uat.acting import rollout
from uat.bench.cases import set_path
from uat.bench.recompute import History, Recomputing
from uat.bench.timing import Call
from uat.config import RunConfig, override, setting_names
from uat.engines.graph import Captured
from uat.episode import Step
from uat.methods import Policy
from uat.nn.cache import KVCache
from uat.serving import Session
from uat.training.trainer import build_policy


def plain(state: Any) -> Any:
    """A memory that was filled on the fused path as the plain ones keep it."""
    cache: KVCache | None = getattr(state, "cache", state if isinstance(state, KVCache) else None)
    if cache is not None and cache.packed is not None:
        cache.kv_L2BHSE, cache.packed = cache.kv_L2BHSE.float(), None
    return state


class Stepping:
    """A policy with room for the context in its position table, if it has one, and the steps that it processes."""

    def __init__(self, config: RunConfig, batch: int, context: int, device: torch.device) -> None:
        table = "method.max_positions"
        self.config = override(config, {table: context + 1} if table in setting_names(config) else {})
        domain = self.config.build_domain()
        self.policy = build_policy(self.config, domain, device).eval()
        self.batch, self.context, self.device = batch, context, device
        simulator = domain.simulator("test", device)
        episodes = rollout(None, simulator, simulator.noise(torch.arange(batch, device=device), seed=0))
        self._seen = domain.spec.clock.batch(episodes)

    def step_at(self, t: int) -> Step:
        """The step at time t, with tensors laid out as in a rollout."""
        seen, at = self._seen, t % self._seen.obs.shape[1]
        inputs = {name: getattr(seen, name)[:, at].contiguous() for name in ("obs", "prev_action", "prev_reward")}
        return Step(**inputs, first=torch.full_like(seen.valid[:, 0], t == 0))

    def calls(self) -> Iterator[tuple[str, Call | str]]:
        """The call of each path, or the reason why it is unsupported."""
        yield "recompute", self._recompute()
        run = self._step(plain(self._filled()))
        yield "cached", Call(self._on_path("cached", run))
        if self.device.type == "cuda":
            yield "graph", Call(self._capture("cached", run))
            reason = set_path(self.policy, "fast")
            yield "fast", reason if reason else Call(self._capture("fast", self._step(self._filled())))
        else:
            yield "fast", self._session()

    # ------------------------------------------------------------ paths

    def _recompute(self) -> Call:
        agent, last = Recomputing(self.policy), self.step_at(self.context - 1)
        past = [self.step_at(t) for t in range(self.context - 1)]

        @torch.no_grad()
        def run() -> None:
            agent.step(History(list(past)), last)

        return Call(run)

    def _step(self, state: Any) -> Callable[[], None]:
        """The step, followed by the copy of the new state into the old one's storage that a captured loop needs."""
        last = self.step_at(self.context - 1)
        counters = [(x, x.clone()) for x in tensors(state) if not x.is_floating_point()]

        @torch.no_grad()
        def run() -> None:
            for counter, value in counters:
                counter.copy_(value)
            _, after = self.policy.step(state, last)
            for old, new in zip(tensors(state), tensors(after), strict=True):
                if old is not new:
                    old.copy_(new)

        return run

    def _on_path(self, path: str, run: Callable[[], None]) -> Callable[[], None]:
        def chosen() -> None:
            set_path(self.policy, path)
            run()

        return chosen

    def _capture(self, path: str, run: Callable[[], None]) -> Callable[[], Any]:
        set_path(self.policy, path)
        return Captured(run)

    @torch.no_grad()
    def _filled(self) -> Any:
        """The policy's memory after all steps but the last."""
        set_path(self.policy, "fast")  # fills faster; a policy without this path stays on the plain one
        state = self.policy.init_state(self.batch, self.context, self.device)
        for t in range(self.context - 1):
            _, state = self.policy.step(state, self.step_at(t))
        return state

    def _session(self) -> Call | str:
        """A Session with all its checks, which plays whole episodes; the last sixteenth of each is timed."""
        if "path" not in inspect.signature(Session).parameters:
            return "a Session has no fast path yet"
        chosen: dict[str, Any] = {"path": "auto"}
        session = Session(self.policy, streams=self.batch, capacity=self.context, **chosen)
        if getattr(session, "path", None) != "fast":
            return f"a Session of {self.batch} streams takes the path {getattr(session, 'path', 'cached')!r}"
        steps = [self.step_at(t) for t in range(min(self.context, self._seen.obs.shape[1]))]
        untimed = self.context - max(1, self.context // 16)
        t = 0

        def act() -> None:
            nonlocal t
            step = steps[t % len(steps)]
            session.act(step.obs, reward=step.prev_reward if t else None)
            t += 1

        def before() -> None:
            nonlocal t
            if t == self.context:
                session.restart()
                t = 0
            while t < untimed:
                act()

        return Call(act, before)


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, Tensor):
        return [state]
    if is_dataclass(state):
        return [x for item in fields(state) for x in tensors(getattr(state, item.name))]
    return [x for item in state for x in tensors(item)] if isinstance(state, list | tuple) else []


def state_bytes(policy: Policy, batch: int, context: int, device: torch.device) -> int:
    """Size in bytes of the state of these streams."""
    return sum(x.numel() * x.element_size() for x in tensors(policy.init_state(batch, context, device)))
