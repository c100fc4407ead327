"""Gymnasium environments that render images of themselves, for `uat watch`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from uat.adapters.environments import LocalEnvironments, Rules
from uat.adapters.gymnasium import GymDomain
from uat.adapters.simulator import GymSimulator, GymWorld
from uat.adapters.sources import Copies, Factory, Registered, Source, in_words
from uat.adapters.spaces import Values
from uat.settings import shown
from uat.spec import Spec

MODE = "rgb_array"
"""Render mode of Gymnasium in which `env.render()` returns an array."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Makes environments that render arrays; raises a ValueError for those that cannot."""

    source: Registered | Factory | Copies

    @property
    def label(self) -> str:
        return self.source.label

    def __call__(self) -> Any:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it greets on standard output
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # arrays need no display
        env = self.source()
        if isinstance(self.source, Registered):
            modes = env.metadata.get("render_modes") or []
            env.close()
            if MODE not in modes:
                known = f"its render modes are {', '.join(map(str, modes))}" if modes else "it has no render modes"
                raise ValueError(f"{self.label} renders no {MODE} frames: {known}")
            arguments = {**json.loads(self.source.arguments), "render_mode": MODE}
            return Registered(self.source.name, json.dumps(arguments))()
        if env.render_mode != MODE:
            raise ValueError(
                f"{self.label} renders no {MODE} frames, since it was made with render_mode={shown(env.render_mode)}: "
                f"pass it again, made with render_mode={MODE!r}"
            )
        return env


class RenderedSimulator(GymSimulator):
    """Environments stepped in this process, the first of which is watched."""

    def __init__(self, spec: Spec, stepping: LocalEnvironments) -> None:
        super().__init__(spec, stepping, torch.device("cpu"))
        self.local = stepping

    def frame(self, world: GymWorld) -> Values:
        """Return what the first environment renders."""
        assert self.local.episodes is not None
        try:
            image = self.local.envs[0].render()
        except Exception as error:  # an environment may raise anything
            raise self.local.episodes.error(0, f"raised {in_words(error)} while rendering") from error
        if not isinstance(image, np.ndarray):
            what = f"rendered {shown(image)}, where an array of shape (height, width, 3) is expected"
            raise self.local.episodes.error(0, what)
        return image


def rendered(domain: GymDomain) -> RenderedSimulator:
    """Return the environments of a domain, made such that they render arrays."""
    source: Source | Any = domain.source
    if not isinstance(source, Registered | Factory | Copies):
        raise ValueError(
            f"{source.label} is a vector of environments: pass a single one, made with render_mode={MODE!r}"
        )
    rules = Rules(domain.spec.steps, domain.config.mask_key)
    return RenderedSimulator(domain.spec, LocalEnvironments(Rendering(source), rules, domain.spaces))  # pyright: ignore[reportArgumentType]
