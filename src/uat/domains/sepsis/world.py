"""Sepsis worlds: patients whose response to treatment depends on a hidden regime.

Order of events at step t: the regime may change, the patient is observed, the expert labels, the agent treats; the
state moves under the regime of step t, which earns the reward and may end the episode. A change at t shows in label t,
and in observations from t + 1 on.

Axes: B worlds, T time, F clinical columns, O observed components, 3 physiological state (SOFA, lactate, MAP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from uat.contracts import Simulator, Transition
from uat.domains.sepsis.cohort import NUM_COMPONENTS, Cohort
from uat.domains.sepsis.schedule import SegmentLaw
from uat.domains.sepsis.treatment import ACTIONS, EFFECTS, EXPERT, LACTATE, SOFA, Physiology, Task, to_state, to_z
from uat.episode import Noise
from uat.noise import integers, uniform
from uat.settings import Amount, Between, Scale, Steps, check_fields
from uat.spec import Discrete, Spec, Vector

SOFA_WEIGHT, LACTATE_WEIGHT = 0.1, 0.05
"""Reward per unit of improvement."""
DEATH_CHANCE, DEATH_SOFA, DEATH_LACTATE = 0.01, 0.85, 0.7
RECOVERY_CHANCE, RECOVERY_LEVEL = 0.02, 0.3


RESISTANCE = 0.8
"""Default of the setting; the task `aligned` has none, and accepts no other value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SepsisConfig:
    task: Task = "regimes"
    """Effects of treatment: in regimes the paper's label is not always the best action, in aligned it always is."""
    cohort: str | None = None
    """Path of a gym-sepsis file sepsis_starting_states.npz of yours; unset: the embedded synthetic cohort."""
    horizon: Steps = 90
    """Steps of one episode, unless the patient recovers or dies."""
    min_segments: Steps = 4
    """Minimum number of regime segments per episode."""
    max_segments: Steps = 6
    """Maximum number of regime segments per episode."""
    min_length: Steps = 3
    """Minimum number of steps per segment."""
    evenness: Scale = 1.0
    """Evenness of the segment lengths of an episode: 1 makes all splits of the horizon equally likely."""
    response: Scale = 0.06
    """Movement of the state per unit of treatment effect."""
    state_noise: Scale = 0.012
    """Standard deviation of the noise on each coordinate of the state, per step."""
    obs_noise: Amount = 0.1
    """Standard deviation of the noise on each observed component, in z-scores."""
    resistance: Annotated[float, Between(0, 1, without_low=True)] = RESISTANCE
    """Factor on a benefit for every repeat of a treatment past the third; the task aligned has no such loss."""
    reward_scale: Scale = 80.0
    """Factor on the rewards that policies see."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_segments < self.min_segments:
            raise ValueError(f"max_segments={self.max_segments} must be at least min_segments={self.min_segments}")
        if self.horizon < self.max_segments * self.min_length:
            raise ValueError(
                f"horizon={self.horizon} is too short for max_segments={self.max_segments} segments "
                f"of min_length={self.min_length}"
            )
        if self.resistance != RESISTANCE and not EFFECTS[self.task].wear_off:
            raise ValueError(
                f"resistance={self.resistance} has no effect in task={self.task!r}, where benefits do not wear off: "
                "remove it, or choose task='regimes'"
            )

    @property
    def spec(self) -> Spec:
        return Spec(
            obs=Vector(NUM_COMPONENTS),
            action=Discrete(len(ACTIONS)),
            horizon=self.horizon,
            reward_scale=self.reward_scale,
        )

    @property
    def segments(self) -> SegmentLaw:
        return SegmentLaw(
            horizon=self.horizon,
            least=self.min_segments,
            most=self.max_segments,
            min_length=self.min_length,
            evenness=self.evenness,
        )

    @property
    def remaining_benefit(self) -> float:
        """Factor on a benefit for every repeat past the free ones: 1 if the task's benefits do not wear off."""
        return self.resistance if EFFECTS[self.task].wear_off else 1.0

    def physiology(self, dtype: torch.dtype) -> Physiology:
        return Physiology.of(self.task, self.response, self.remaining_benefit, dtype)


@dataclass(frozen=True, slots=True)
class World:
    state_B3: Tensor
    patient_B: Tensor
    """Row in the cohort."""
    start_BF: Tensor
    """Clinical columns at the start."""
    still_BO: Tensor
    """Contribution of the constant columns to the observation."""
    regime_BT: Tensor
    shock_BT3: Tensor
    """Noise on the state."""
    blur_BTO: Tensor
    """Noise on the observation."""
    fate_BT: Tensor
    """Uniform numbers that decide death and recovery."""
    last_B: Tensor
    """The previous treatment."""
    repeats_B: Tensor
    """Number of times in a row that the previous treatment was given."""
    ended_B: Tensor
    """True if the patient has recovered or died."""
    t: int = 0


class SepsisSimulator(Simulator[World]):
    """Worlds of some patients of a cohort. Only `noise` may read values on the host."""

    def __init__(
        self, config: SepsisConfig, cohort: Cohort, patients: tuple[int, int], device: torch.device | str
    ) -> None:
        """patients: first row of the cohort to use, and the row after the last."""
        self.config, self.spec, self.device, self.patients = config, config.spec, device, patients
        self.physiology = config.physiology(torch.float32).to(device)
        self.expert_R = torch.tensor(EXPERT, device=device)
        self.dynamic = torch.tensor(cohort.dynamic, device=device)
        self.clinical_PF = cohort.clinical_PF.to(device).contiguous()
        still_PF = cohort.clinical_PF.clone()
        still_PF[:, cohort.dynamic] = 0
        self.still_PO = (still_PF @ cohort.components_FO).to(device).contiguous()
        self.moving_3O = cohort.components_FO[cohort.dynamic].to(device).contiguous()

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        c, (first, end) = self.config, self.patients
        ids_B = episode_ids.to(self.device, non_blocking=True)
        steps = c.horizon
        shock_BT3 = _normal(seed, "sepsis.state", ids_B, steps * 3).view(-1, steps, 3)
        blur_BTO = _normal(seed, "sepsis.observation", ids_B, (steps + 1) * NUM_COMPONENTS)
        return {
            "patient": first + integers(seed, "sepsis.patient", ids_B, 1, below=end - first)[:, 0],
            "regime": c.segments.draw(seed, ids_B),
            "state": c.state_noise * shock_BT3,
            "observation": c.obs_noise * blur_BTO.view(-1, steps + 1, NUM_COMPONENTS),
            "fate": uniform(seed, "sepsis.fate", ids_B, steps).float(),
        }

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        patient_B = noise["patient"]
        start_BF = self.clinical_PF[patient_B]
        world = World(
            state_B3=to_state(start_BF[:, self.dynamic]),
            patient_B=patient_B,
            start_BF=start_BF,
            still_BO=self.still_PO[patient_B],
            regime_BT=noise["regime"],
            shock_BT3=noise["state"],
            blur_BTO=noise["observation"],
            fate_BT=noise["fate"],
            last_B=torch.full_like(patient_B, -1),
            repeats_B=torch.zeros_like(patient_B),
            ended_B=torch.zeros_like(patient_B, dtype=torch.bool),
        )
        return world, self._observe(world)

    def expert(self, world: World) -> Tensor:
        return self.expert_R[world.regime_BT[:, world.t]]

    def step(self, world: World, action: Tensor) -> Transition[World]:
        t, ended_B, old_B3 = world.t, world.ended_B, world.state_B3
        repeats_B = torch.where(action == world.last_B, world.repeats_B + 1, 1)
        effect_B = self.physiology.effect_RA[world.regime_BT[:, t], action]
        new_B3 = (self.physiology.expected(old_B3, effect_B, repeats_B) + world.shock_BT3[:, t]).clamp(0, 1)
        new_B3 = torch.where(ended_B[:, None], old_B3, new_B3)
        better_B3, fate_B, (sofa_B, lactate_B, _) = old_B3 - new_B3, world.fate_BT[:, t], new_B3.unbind(1)
        died_B = (sofa_B > DEATH_SOFA) & (lactate_B > DEATH_LACTATE) & (fate_B < DEATH_CHANCE) & ~ended_B
        well_B = (sofa_B < RECOVERY_LEVEL) & (lactate_B < RECOVERY_LEVEL) & (fate_B < RECOVERY_CHANCE) & ~ended_B
        reward_B = SOFA_WEIGHT * better_B3[:, SOFA] + LACTATE_WEIGHT * better_B3[:, LACTATE]
        reward_B = reward_B + well_B.float() - died_B.float()
        after = replace(
            world, state_B3=new_B3, last_B=action, repeats_B=repeats_B, ended_B=ended_B | died_B | well_B, t=t + 1
        )
        terminated_B = ~ended_B if after.t == self.spec.steps else died_B | well_B
        return Transition(after, self._observe(after), reward_B, terminated_B)

    def facts(self, world: World) -> dict[str, Tensor]:
        """The state, the regime, the patient's row, and all 46 columns as z-scores, for readers."""
        return {
            "state": world.state_B3,
            "regime": world.regime_BT[:, world.t],
            "patient": world.patient_B,
            "clinical": self.clinical(world),
        }

    def clinical(self, world: World) -> Tensor:
        """(B, F) all clinical columns at this step."""
        return world.start_BF.index_copy(1, self.dynamic, to_z(world.state_B3))

    def _observe(self, world: World) -> Tensor:
        """(B, O) principal components of the 46 columns at this step, with noise.

        The constant columns were projected once per patient. An elementwise product and a sum give the same bits in
        any batch, which a matrix product does not.
        """
        moved_BO = (to_z(world.state_B3)[:, :, None] * self.moving_3O).sum(1)
        return world.still_BO + moved_BO + world.blur_BTO[:, world.t]


def _normal(seed: int, name: str, ids_B: Tensor, count: int) -> Tensor:
    """(B, count) standard normal numbers."""
    return torch.special.ndtri(uniform(seed, name, ids_B, count)).float()
