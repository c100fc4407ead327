"""A Session: raw observations and rewards in, actions out, step by step.

Values from the caller are checked here. The clock and the policy's `step` are those of training, so the policy sees
the same inputs at each step as in training.
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
from uat.engines import Engine, FrozenFusedEngine, NumpyEngine, plan_session
from uat.episode import Step
from uat.methods import Policy
from uat.nn.cache import ENDLESS
from uat.serving.input_checks import InputChecks, Values
from uat.settings import Count, Seed, Steps, checked, shown
from uat.spec import Discrete, Weights
from uat.tensor_files import first_not_finite
from uat.threads import cpu_threads, thread_count


def _check_policy(policy: Policy) -> Policy:
    checked(policy, Policy, "policy")
    weights = policy.state_dict()
    if not weights or next(iter(weights.values())).is_meta:
        raise ValueError(f"policy: expected a {type(policy).__name__} with weights, got one without values")
    if problem := first_not_finite(weights):
        raise ValueError(f"policy: {problem}, where only finite numbers can be")
    return policy


def _default_capacity(policy: Policy) -> int | None:
    """Return the most steps a stream may have if the user sets no capacity; None means no limit."""
    if policy.endless:
        return None
    if policy.spec.horizon is None:
        raise ValueError(
            f"capacity: the problem has no horizon, and the memory of this {type(policy).__name__} grows with every "
            "step: set the most steps of a stream, or train with a context and positions without an end"
        )
    return policy.spec.horizon


class Session:
    """Plays a policy in `streams` streams at once.

    >>> session = Session(policy, streams=2)
    >>> action = session.act(obs)                       # the first step of both streams
    >>> action = session.act(obs, reward=earned)        # `earned` is what the last action brought

    A session uses the fast step for a few streams on a CPU (NumPy), and for any number of streams on a GPU if the
    policy can be fused (a Triton kernel); the attribute `path` is then "fast". `engine` names the choice, and `refused`
    the reason why it is not faster. The kernel is compiled when the first session of its kind opens, and again when
    actions are first masked. The fast step copies the weights when the session opens, so open a new session after
    further training. With path="cached" the session calls the policy's own
    `step`, which always uses the current weights.

    A session can be copied (`copy.copy` shares the policy, `copy.deepcopy` copies it) and pickled. On a CPU, a forked
    process can keep using it. Each copy starts from the memory of the original and continues independently.

    capacity: the most steps of a stream; unset: the horizon, or no limit if the policy remembers a window of steps
        (`context`) and its positions have no end. Memory and time per step are then constant.
    threads: CPU threads of the cached step, in whichever thread `act` is called; unset: UAT_THREADS, or one.
    seed: sample actions from the policy's distribution, with random numbers of this seed; unset: take the most likely
        action. Copies of a session draw the same numbers.
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
        seed: int | None = None,
    ) -> None:
        self._generator = None if seed is None else np.random.default_rng(abs(checked(seed, Seed, "seed")))
        self.threads, self._process = thread_count(threads), os.getpid()
        with cpu_threads(self.threads):
            self.policy, self.device = _check_policy(policy).eval(), next(policy.parameters()).device
        self.spec, self.streams = policy.spec, checked(streams, Count, "streams")
        self.capacity = _default_capacity(policy) if capacity is None else checked(capacity, Steps, "capacity")
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
        self._checks = InputChecks(self.spec, streams)
        self._steps = np.zeros(streams, dtype=np.int64)
        self._longest, self._fresh = 0, True  # the most steps of any stream; whether a stream is at its first step
        self._none = self._last = self.spec.no_action(streams).numpy()
        self._going = np.zeros(streams, dtype=bool)
        self._rewards = deque(np.zeros(streams, dtype=np.float32) for _ in range(self.spec.reward_lag - 1))
        self._unknown: deque[Values] | None = None  # masks of unknown rewards on their way; None: no mask was given

    @property
    def engine(self) -> str:
        """Name of the engine that computes the steps: "plain", "NumPy step" or "fused step"."""
        return self._engine.name

    @property
    def refused(self) -> str | None:
        """Why no faster engine computes the steps; None: none was requested, or this is the fastest."""
        return self._engine.refused

    def _open(self, path: str) -> tuple[Engine, Any]:
        """Return the engine and its initial state."""
        engine = self._plan(path)
        try:
            return engine, engine.init_state(self.streams, self._room, self.device)
        except ValueError:
            raise
        except Exception as error:  # compilers and drivers raise errors of their own types
            if path != "auto" or not isinstance(engine, FrozenFusedEngine):
                raise
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                f"the fused step does not run on this device ({type(error).__name__}: {reason}): the session uses the "
                "cached step, which is slower; set path='cached' to choose it without this warning",
                stacklevel=3,
            )
            plain = Engine(self.policy, refused=reason)
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
    ) -> Any:
        """Return the policy's action in each stream.

        A session of one stream also takes an observation without the axis of streams, such as `env.reset` returns, and
        then returns a NumPy action without it, which `env.step` takes.

        reward: the reward of the previous step in each stream (for logs: of the step just logged). Required if the
            policy sees rewards, even with a delay, unless all streams are at their first step (for logs: always
            required). Ignored in streams at their first step. A single stream may pass a plain number.
        reward_known: False in streams whose reward is unknown; the reward may be NaN there, and the policy sees 0. With
            a delay, `set_reward` can supply it until it is due.
        action: the action actually taken in the previous step, if it differs from the one this session returned.
        allowed: True for actions that are allowed now.
        """
        if os.getpid() != self._process:
            self._check_fork()
        if self._longest >= self._room:
            raise ValueError(
                f"stream {self._steps.argmax()} has seen {self._longest} steps, and the session holds {self.capacity}: "
                "restart the stream, or open the session with a larger capacity"
            )
        checks = self._checks
        if alone := self.streams == 1 and checks.is_one(obs):
            obs, action, allowed = checks.in_a_batch(obs), checks.in_a_batch(action), checks.in_a_batch(allowed)
        obs_checked = checks.observations(obs)
        known_B = None if reward_known is None else checks.known(reward_known)
        reward_B = self._no_reward() if reward is None else checks.rewards(reward, known_B)
        prev_action = self._last if action is None else checks.actions(action)
        allowed_BA = None if allowed is None else checks.allowed(allowed)

        first_B = self._going
        if self._fresh:
            first_B = self._steps == 0
            prev_action = np.where(first_B.reshape(-1, *[1] * (prev_action.ndim - 1)), self._none, prev_action)
        step = obs_checked, prev_action, self._delayed(reward_B, first_B), first_B, allowed_BA
        arrived_B = None
        if known_B is not None or self._unknown is not None:
            arrived_B = self._arrived(np.full(self.streams, reward is not None) if known_B is None else known_B)
        if isinstance(self._engine, NumpyEngine):
            answer = self._in_numpy(self._engine, *step)
        else:
            answer = self._in_torch(*step, arrived_B)
        self._steps += 1
        self._longest, self._fresh = self._longest + 1, False
        return self._last[0].copy() if alone else answer

    def restart(self, streams: Array | None = None) -> None:
        """Begin a new episode with the next step of these streams: stream numbers, or a mask; unset: all streams."""
        self._steps[self._numbers_of(streams, "restart")] = 0
        self._longest, self._fresh = int(self._steps.max()), bool((self._steps == 0).any())

    def set_reward(self, reward: Array, *, steps_ago: int, streams: Array | None = None) -> None:
        """Supply or correct the reward of an earlier step that the policy has not received yet.

        The clock delivers a reward `spec.reward_lag` steps after its action. Until then the policy's next answers are
        those of a session that was given this reward in time.

        >>> session.act(obs, reward=float("nan"), reward_known=False)    # what the last action brought is not known yet
        >>> session.set_reward(1.0, steps_ago=2)                         # now it is: two steps before the next `act`

        reward: the reward in each of these streams. For a single stream it may be a plain number.
        steps_ago: from 2 to `spec.reward_lag`, counted back from the next call of `act`, which takes the reward of one
            step ago itself.
        streams: stream numbers, or a mask; unset: all streams.
        """
        ago, lag, chosen = checked(steps_ago, Count, "steps_ago"), self.spec.reward_lag, self._numbers_of(streams)
        reward_B = InputChecks(self.spec, len(chosen)).rewards(reward)
        for stream, step in zip(chosen.tolist(), (self._steps[chosen] - ago).tolist(), strict=True):
            if step < 0:
                raise ValueError(
                    f"steps_ago={ago}: stream {stream} has taken {ago + step} steps of its episode, and rewards of an "
                    "earlier episode are never delivered; name the streams that have taken more with streams="
                )
            if ago > lag:
                by = f"at most {lag} steps after its action" if lag > 1 else "to the call of `act` that takes it"
                raise ValueError(
                    f"steps_ago={ago}: the reward of step {step} of stream {stream} was delivered at step {step + lag} "
                    f"(reward_lag={lag}), and the policy has acted on it; give a reward {by}, or replay the episode in "
                    "a new session with the right rewards"
                )
        if ago == 1:
            raise ValueError("steps_ago=1: the next call of `act` takes the reward of the last step, as reward=")
        self._rewards[1 - ago][chosen] = reward_B
        if self._unknown is not None:
            self._unknown[1 - ago][chosen] = False

    def _numbers_of(self, streams: Array | None, name: str = "streams") -> Values:
        if streams is None:
            return np.arange(self.streams)
        named = as_tensor(name, streams, "stream numbers or a mask")
        chosen = np.atleast_1d((named.double() if named.is_floating_point() else named).numpy())
        if chosen.dtype == bool and chosen.shape == (self.streams,):
            return np.flatnonzero(chosen)
        if chosen.ndim != 1 or (not np.issubdtype(chosen.dtype, np.integer) and chosen.size):
            mask = f"a mask of {self.streams} booleans"
            raise ValueError(f"{name}: expected stream numbers or {mask}, got {shown(streams)}")
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.streams):
            raise ValueError(f"{name}: streams must lie in [0, {self.streams}), got {shown(chosen.tolist())}")
        if len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"{name}: expected different stream numbers, or booleans as a mask, got {shown(streams)}")
        return chosen.astype(np.int64)

    # ------------------------------------------------------------ copies and other processes

    def __copy__(self) -> Session:
        return copy.deepcopy(self, {id(self.policy): self.policy})

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        if os.getpid() != self._process:
            self._check_fork()
        memo[id(self)] = twin = object.__new__(type(self))
        with cpu_threads(self.threads):  # copying large weights uses threads
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_process"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _process=os.getpid())

    def _check_fork(self) -> None:
        """Refuse a forked process that would need the GPU or the threads of its parent."""
        if self.device.type != "cpu" or self.threads > 1:
            why = "the GPU" if self.device.type != "cpu" else f"the {self.threads} threads"
            raise ValueError(
                f"this session belongs to process {self._process}, and a forked process cannot use {why} of "
                "its parent: open a session there, or spawn the process and hand it a pickled session"
            )
        self._process = os.getpid()

    # ------------------------------------------------------------ decisions

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
        if not np.abs(logits_BA.max(-1)).max() < math.inf:  # also true for NaN
            self._refuse_answer()
        if isinstance(self.spec.action, Discrete):
            noise_BA = self._noise()
            self._last = (logits_BA if noise_BA is None else logits_BA + noise_BA.numpy()).argmax(-1)  # first of equal
        else:
            with cpu_threads(self.threads):  # a softmax of any size uses all threads
                self._last = choose(torch.from_numpy(logits_BA), self.spec, self._noise()).numpy()
        return torch.from_numpy(self._last.copy())

    @torch.no_grad()
    def _in_torch(
        self,
        obs: Values,
        action: Values,
        reward_B: Values,
        first_B: Values,
        allowed_BA: Values | None,
        arrived_B: Values | None,
    ) -> Tensor:
        arrays = {"obs": obs, "prev_action": action, "prev_reward": reward_B, "first": first_B}
        if arrived_B is not None:
            arrays["reward_known"] = arrived_B
        copies = {name: torch.tensor(x, device=self.device) for name, x in arrays.items()}  # a policy may keep them
        step = Step(**copies, allowed=None if allowed_BA is None else torch.tensor(allowed_BA, device=self.device))
        if isinstance(self._engine, FrozenFusedEngine):
            logits_BA, chosen, self._state = self._engine.answer(self._state, step)
            noise_BA = self._noise()
            chosen = chosen if noise_BA is None else choose(logits_BA, self.spec, noise_BA.to(logits_BA))
            answer, largest = chosen.cpu(), float(logits_BA.amax(-1).cpu().abs().max())
        else:
            with cpu_threads(self.threads):
                logits_BA, self._state = self._engine.step(self._state, step)
                noise_BA = self._noise()
                noise_BA = None if noise_BA is None else noise_BA.to(logits_BA)
                answer, largest = choose(logits_BA, self.spec, noise_BA).cpu(), float(logits_BA.amax(-1).abs().max())
        if not largest < math.inf:  # also true for NaN
            self._refuse_answer()
        self._last = (
            (answer.float() if answer.dtype == torch.bfloat16 else answer).numpy().copy()
        )  # NumPy has no bfloat16
        return answer

    def _noise(self) -> Tensor | None:
        """Return the noise (B, A) that decides sampled actions; None: actions are not sampled."""
        if self._generator is None or isinstance(self.spec.action, Weights):
            return None
        shape = self.streams, self.spec.action.count
        drawn = self._generator.gumbel if isinstance(self.spec.action, Discrete) else self._generator.normal
        return torch.from_numpy(drawn(size=shape).astype(np.float32))

    def _refuse_answer(self) -> None:
        """Reset all streams, since their memory may hold values that are not finite, and raise an error."""
        with cpu_threads(self.threads):
            self._state = self._engine.init_state(self.streams, self._room, self.device)
        self._last = self._none
        self.restart()
        raise ValueError(
            "the policy's answer is not finite: its weights are too large for these inputs; all streams of the "
            "session begin a new episode with their next step"
        )

    # ------------------------------------------------------------ rewards

    def _no_reward(self) -> Values:
        """Return zeros for a missing reward; raise an error if the policy sees rewards and some are already due."""
        if "reward" in self.policy.sees and (self.spec.reward_lag == 0 or self._longest > 0):
            may = "no step" if self.spec.reward_lag == 0 else "only the first step of all streams"
            raise ValueError(
                f"reward: expected what the last step earned in each of {self.streams} streams, got None: "
                f"{type(self.policy).__name__} sees rewards, so {may} may leave it out"
            )
        return np.zeros(self.streams, dtype=np.float32)

    def _delayed(self, earned_B: Values, first_B: Values) -> Values:
        """Return the reward that the policy sees at this step, delayed and scaled as the clock defines."""
        lag, scale = self.spec.reward_lag, self.spec.reward_scale
        if self._fresh and lag > 0:  # the last reward of an episode must not leak into the next episode
            earned_B = np.where(first_B, np.float32(0), earned_B)
            for old_B in self._rewards:
                old_B[first_B] = 0
        if lag > 1:
            self._rewards.append(earned_B.copy())  # the caller may overwrite its array
            earned_B = self._rewards.popleft()
        return earned_B if scale == 1 else earned_B * np.float32(scale)

    def _arrived(self, known_B: Values) -> Values:
        """Return (B,) True where the reward that is delivered at this step is known; see `Clock.arrived`."""
        if self._unknown is None:
            self._unknown = deque(np.zeros(self.streams, dtype=bool) for _ in self._rewards)
        self._unknown.append(~known_B)
        return (self._steps >= self.spec.reward_lag) & ~self._unknown.popleft()
