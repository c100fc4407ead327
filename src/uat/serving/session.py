"""A Session: raw observations and rewards in, actions out, step by step.

Here values enter from outside, so here they are checked. Inside, the same clock and the same `step` as in
training decide what the policy knows.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from uat.checks import Array, as_tensor
from uat.distributions import choose
from uat.engines import Engine, FusedEngine, NumpyEngine, plan_session
from uat.episode import Step
from uat.methods import Policy
from uat.nn.cache import ENDLESS
from uat.serving.entrance import Entrance, Values
from uat.settings import Count, Steps, checked, shown
from uat.spec import Discrete
from uat.tensor_files import first_not_finite
from uat.threads import cpu_threads, thread_count


def _check_policy(policy: Policy) -> Policy:
    checked(policy, Policy, "policy")
    weights = policy.state_dict()
    if not weights or next(iter(weights.values())).is_meta:
        raise ValueError(f"policy: expected a {type(policy).__name__} with weights, got one without values")
    if said := first_not_finite(weights):
        raise ValueError(f"policy: {said}, where only finite numbers can be")
    return policy


def _most_steps(policy: Policy) -> int | None:
    """How many steps a stream may have where the user does not say; None: no limit."""
    if policy.endless:
        return None
    if policy.spec.horizon is None:
        raise ValueError(
            f"capacity: the problem has no horizon, and the memory of this {type(policy).__name__} grows with its "
            "streams: say how many steps a stream may have, or train with a context and positions that do not end"
        )
    return policy.spec.horizon


class Session:
    """Plays a policy in `streams` streams at once.

    >>> session = Session(policy, streams=2)
    >>> action = session.act(obs)                       # the first step of both streams
    >>> action = session.act(obs, reward=earned)        # `earned` is what the last action brought

    A few streams on a CPU, and any number on a GPU where the policy can be fused, take the fast step (`path` says so):
    by NumPy, or by a kernel, which is compiled when the first session of its kind opens (and once more where actions
    are first masked). It copies the weights then: open another session after training on. With path="cached" the
    policy's own `step` plays, whatever its weights are by then.

    A session can be copied (`copy.copy` shares the policy, `copy.deepcopy` copies it), pickled, and on a CPU used on in
    a forked process: each copy remembers what the original did, and goes on by itself with the same decisions.

    capacity: the most steps of a stream; unset: the horizon, or no limit where the policy remembers a window of steps
        (`context`) and its positions have no end: then memory and time per step stay constant.
    threads: CPU threads of the cached step, wherever `act` is called; unset: UAT_THREADS, or one.
    """

    path: Literal["fast", "cached"]
    _state: Any

    def __init__(
        self,
        policy: Policy,
        *,
        streams: int = 1,
        capacity: int | None = None,
        path: Literal["auto", "fast", "cached"] = "auto",
        threads: int | None = None,
    ) -> None:
        self.threads, self._process = thread_count(threads), os.getpid()
        with cpu_threads(self.threads):
            self.policy, self.device = _check_policy(policy).eval(), next(policy.parameters()).device
        self.spec, self.streams = policy.spec, checked(streams, Count, "streams")
        self.capacity = _most_steps(policy) if capacity is None else checked(capacity, Steps, "capacity")
        self._room = ENDLESS if self.capacity is None else self.capacity
        try:
            with cpu_threads(self.threads):
                self._engine, self._state = self._open(path)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error).lower():
                raise
            limit = "" if self.capacity is None else f" with capacity={self.capacity}"
            message = f"streams={self.streams}{limit} do not fit into memory: {shown(str(error), 100)}"
            raise ValueError(message) from None
        self.path = "cached" if self._engine.name == "plain" else "fast"
        self._entrance = Entrance(self.spec, streams)
        self._steps = np.zeros(streams, dtype=np.int64)
        self._longest, self._fresh = 0, True  # the most steps of any stream; whether some stream has seen none
        self._none = self._last = self.spec.no_action(streams).numpy()
        self._going = np.zeros(streams, dtype=bool)
        self._rewards = deque(np.zeros(streams, dtype=np.float32) for _ in range(self.spec.reward_lag - 1))

    def _open(self, path: str) -> tuple[Engine, Any]:
        """Return the engine that decides, and its memory."""
        engine = self._plan(path)
        try:
            return engine, engine.init_state(self.streams, self._room, self.device)
        except ValueError:
            raise
        except Exception as error:  # whatever a compiler or a driver says: each has errors of its own
            if path != "auto" or not isinstance(engine, FusedEngine):
                raise
            said = str(error).strip().split("\n")[0]
            warnings.warn(
                f"the fused step does not run on this device ({type(error).__name__}: {said}): the session takes the "
                "cached one, which is slower; path='cached' asks for it without this warning",
                stacklevel=3,
            )
            plain = Engine(self.policy, refused=said)
            return plain, plain.init_state(self.streams, self._room, self.device)

    def _plan(self, path: str) -> Engine:
        checked(path, Literal["auto", "fast", "cached"], "path")
        prefer: Literal["auto", "fast", "plain"] = "plain" if path == "cached" else "auto" if path == "auto" else "fast"
        engine = plan_session(self.policy, self.streams, prefer=prefer)
        if path == "fast" and engine.name == "plain":
            raise ValueError(f"path='fast' is not possible: {engine.refused}")
        return engine

    def act(
        self,
        obs: Array,
        *,
        reward: Array | None = None,
        reward_known: Array | None = None,
        action: Array | None = None,
        allowed: Array | None = None,
    ) -> Tensor:
        """The policy's decision in each stream.

        reward: what the previous step earned in each stream (for logs: what the step just logged earned). Where the
            policy sees rewards it is needed, however late the policy is told, unless all streams are at their first
            step (for logs: always). A stream at its first step ignores it. One stream takes a plain number;
        reward_known: False in streams where nobody knows that reward, which may be NaN there: the policy is told 0;
        action: what was really done in the previous step, if not what this session answered;
        allowed: True where an action may be taken now.
        """
        if os.getpid() != self._process:
            self._check_fork()
        if self._longest >= self._room:
            raise ValueError(
                f"stream {self._steps.argmax()} has seen {self._longest} steps, and the session holds {self.capacity}: "
                "restart the stream, or open the session with a larger capacity"
            )
        enter = self._entrance
        seen = enter.observations(obs)
        earned_B = self._unrewarded() if reward is None else enter.rewards(reward, reward_known)
        done = self._last if action is None else enter.actions(action)
        may_BA = None if allowed is None else enter.allowed(allowed)

        first_B = self._going
        if self._fresh:
            first_B = self._steps == 0
            done = np.where(first_B.reshape(-1, *[1] * (done.ndim - 1)), self._none, done)
        told = seen, done, self._delayed(earned_B, first_B), first_B, may_BA
        answer = self._in_numpy(self._engine, *told) if isinstance(self._engine, NumpyEngine) else self._in_torch(*told)
        self._steps += 1
        self._longest, self._fresh = self._longest + 1, False
        return answer

    def restart(self, streams: Array | None = None) -> None:
        """Some streams (their numbers, or a mask; all, if none are named) begin a new episode with their next step."""
        self._steps[self._numbers_of(streams)] = 0
        self._longest, self._fresh = int(self._steps.max()), bool((self._steps == 0).any())

    def _numbers_of(self, streams: Array | None) -> Values:
        if streams is None:
            return np.arange(self.streams)
        named = as_tensor("restart", streams, "stream numbers or a mask")
        chosen = np.atleast_1d((named.double() if named.is_floating_point() else named).numpy())
        if chosen.dtype == bool and chosen.shape == (self.streams,):
            return np.flatnonzero(chosen)
        if chosen.ndim != 1 or (not np.issubdtype(chosen.dtype, np.integer) and chosen.size):
            mask = f"a mask of {self.streams} booleans"
            raise ValueError(f"restart: expected stream numbers or {mask}, got {shown(streams)}")
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.streams):
            raise ValueError(f"restart: streams must lie in [0, {self.streams}), got {shown(chosen.tolist())}")
        if len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"restart: expected different stream numbers, or booleans as a mask, got {shown(streams)}")
        return chosen.astype(np.int64)

    # ------------------------------------------------------------ copies and other processes

    def __copy__(self) -> Session:
        return copy.deepcopy(self, {id(self.policy): self.policy})

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        if os.getpid() != self._process:
            self._check_fork()
        memo[id(self)] = twin = object.__new__(type(self))
        with cpu_threads(self.threads):  # large weights are copied by as many threads
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_process"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _process=os.getpid())

    def _check_fork(self) -> None:
        """In a forked process neither a GPU nor threads of the parent go on."""
        if self.device.type != "cpu" or self.threads > 1:
            why = "the GPU" if self.device.type != "cpu" else f"the {self.threads} threads"
            raise ValueError(
                f"this session belongs to process {self._process}, and a forked process cannot use {why} of "
                "its parent: open a session there, or spawn the process and hand it a pickled session"
            )
        self._process = os.getpid()

    # ------------------------------------------------------------ what is known, and the answer

    def _in_numpy(
        self,
        engine: NumpyEngine,
        obs: Values,
        action: Values,
        reward_B: Values,
        first_B: Values,
        allowed_BA: Values | None,
    ) -> Tensor:
        logits_BA = engine.numpy.decide(self._state, obs, action, reward_B.tolist(), first_B.tolist(), allowed_BA)
        if not np.abs(logits_BA.max(-1)).max() < math.inf:  # NaN is not below it either
            self._refuse_answer()
        if isinstance(self.spec.action, Discrete):
            self._last = logits_BA.argmax(-1)  # the first of equals, as in torch
        else:
            with cpu_threads(self.threads):  # a softmax of any size asks for all threads
                self._last = choose(torch.from_numpy(logits_BA), self.spec).numpy()
        return torch.from_numpy(self._last.copy())

    @torch.no_grad()
    def _in_torch(
        self, obs: Values, action: Values, reward_B: Values, first_B: Values, allowed_BA: Values | None
    ) -> Tensor:
        told = {"obs": obs, "prev_action": action, "prev_reward": reward_B, "first": first_B}
        copies = {name: torch.tensor(x, device=self.device) for name, x in told.items()}  # a policy may keep them
        may_BA = None if allowed_BA is None else torch.tensor(allowed_BA, device=self.device)
        step = Step(**copies, allowed=may_BA)
        if isinstance(self._engine, FusedEngine):
            chosen, self._state = self._engine.decide(self._state, step)
            answer = chosen.cpu()
        else:
            with cpu_threads(self.threads):
                logits_BA, self._state = self._engine.step(self._state, step)
                answer, largest = choose(logits_BA, self.spec).cpu(), float(logits_BA.amax(-1).abs().max())
            if not largest < math.inf:  # NaN is not below it either
                self._refuse_answer()
        self._last = (
            (answer.float() if answer.dtype == torch.bfloat16 else answer).numpy().copy()
        )  # NumPy has no bfloat16
        return answer

    def _refuse_answer(self) -> None:
        """A memory that gave such an answer may hold more of it: the session forgets all, and says so."""
        with cpu_threads(self.threads):
            self._state = self._engine.init_state(self.streams, self._room, self.device)
        self._last = self._none
        self.restart()
        raise ValueError(
            "the policy's answer is not finite: its weights are too large for what it was told; all streams of the "
            "session begin a new episode with their next step"
        )

    # ------------------------------------------------------------ rewards

    def _unrewarded(self) -> Values:
        """No reward was told: zeros, if there can be none yet or the policy would not look; otherwise an error."""
        if "reward" in self.policy.sees and (self.spec.reward_lag == 0 or self._longest > 0):
            may = "no step" if self.spec.reward_lag == 0 else "only the first step of all streams"
            raise ValueError(
                f"reward: expected what the last step earned in each of {self.streams} streams, got None: "
                f"{type(self.policy).__name__} sees rewards, so {may} may leave it out"
            )
        return np.zeros(self.streams, dtype=np.float32)

    def _delayed(self, earned_B: Values, first_B: Values) -> Values:
        """The reward channel of this step, as the clock defines it: late by the lag, and scaled."""
        lag, scale = self.spec.reward_lag, self.spec.reward_scale
        if self._fresh and lag > 0:  # what an episode's last action earned must not leak into the next episode
            earned_B = np.where(first_B, np.float32(0), earned_B)
            for old_B in self._rewards:
                old_B[first_B] = 0
        if lag > 1:
            self._rewards.append(earned_B.copy())  # whoever told it may write over it
            earned_B = self._rewards.popleft()
        return earned_B if scale == 1 else earned_B * np.float32(scale)
