"""KV cache of all layers with one length per stream, for the whole past or for its last steps.

Writes are in place. On a GPU, shapes are static and nothing is copied to the host. Slots past a stream's length are
never read; tests fill them with huge numbers.
Shapes: L layers, 2 (keys, values), B streams, H heads, S capacity, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from uat.contracts import Memory

ENDLESS = 2**62
"""Capacity that stands for endless streams, for memories that keep a window of steps."""


class Window(NamedTuple):
    """The slots that one step reads and writes."""

    slots: int
    """Number of slots that the step reads in every stream, from the first one on."""
    visible_BS: Tensor | None
    """(B, slots) True for the slots that a stream may read; None: all of them."""
    slot: int | None = None
    """Slot for the keys and values of this step, if all streams have the same one and the host knows it."""


@dataclass(slots=True)
class KVCache(Memory):
    kv_L2BHSE: Tensor
    length_B: Tensor
    """Tokens that each stream has seen."""

    @classmethod
    def empty(cls, *, layers: int, streams: int, heads: int, capacity: int, d_head: int, like: Tensor) -> Self:
        """Return an empty cache with the device and dtype of `like`."""
        return cls(
            kv_L2BHSE=like.new_zeros(layers, 2, streams, heads, capacity, d_head),
            length_B=torch.zeros(streams, dtype=torch.long, device=like.device),
        )

    @property
    def capacity(self) -> int:
        return self.kv_L2BHSE.shape[-2]

    def restart(self, first_B: Tensor) -> None:
        """Clear the streams that start an episode; leave the others unchanged."""
        self.length_B.masked_fill_(first_B, 0)

    def window(self) -> Window:
        """Return the slots that this step reads: only the filled ones on a CPU, where reading lengths is free."""
        if not self.on_host():
            return Window(self.capacity, self.visible())
        shortest, longest = (int(length) for length in self.length_B.aminmax())
        if shortest == longest:
            return Window(longest + 1, None, longest)
        return Window(longest + 1, self.visible()[:, : longest + 1])

    def on_host(self) -> bool:
        """Whether the lengths are on the CPU, where reading them is free, and there is at least one stream."""
        return self.length_B.device.type == "cpu" and len(self.length_B) > 0

    def write(self, layer: int, k_BHE: Tensor, v_BHE: Tensor, window: Window | None = None) -> tuple[Tensor, Tensor]:
        """Write this step's key and value into each stream's next slot.

        Return the layer's keys and values (B, H, S, E) in the window, or all of them without a window.
        """
        kv_2BHSE = self.kv_L2BHSE[layer]
        if window is not None and window.slot is not None:
            kv_2BHSE[0, :, :, window.slot] = k_BHE
            kv_2BHSE[1, :, :, window.slot] = v_BHE
            return kv_2BHSE[0, :, :, : window.slots], kv_2BHSE[1, :, :, : window.slots]
        slot_B = self.slot()[:, None, None, None].expand(*k_BHE.shape[:2], 1, k_BHE.shape[-1])
        kv_2BHSE[0].scatter_(2, slot_B, k_BHE[:, :, None].to(kv_2BHSE.dtype))
        kv_2BHSE[1].scatter_(2, slot_B, v_BHE[:, :, None].to(kv_2BHSE.dtype))
        slots = self.capacity if window is None else window.slots
        return kv_2BHSE[0, :, :, :slots], kv_2BHSE[1, :, :, :slots]

    def rewrite(self, layer: int, back: int, k_BHE: Tensor, v_BHE: Tensor) -> None:
        """Overwrite the key and value of the token that comes `back` tokens before the next one, in streams that have
        so many tokens."""
        exists_B111 = (self.length_B >= back)[:, None, None, None]
        slot_B11E = self.slot(back)[:, None, None, None].expand(*k_BHE.shape[:2], 1, k_BHE.shape[-1])
        for old_BHSE, new_BHE in zip(self.kv_L2BHSE[layer], (k_BHE, v_BHE), strict=True):
            kept_BH1E = old_BHSE.gather(2, slot_B11E)
            new_BH1E = new_BHE[:, :, None].to(old_BHSE.dtype)
            old_BHSE.scatter_(2, slot_B11E, torch.where(exists_B111, new_BH1E, kept_BH1E))

    def slot(self, back: int = 0) -> Tensor:
        """Return the index (B,) of each stream's next slot, or of the slot of the token `back` tokens before it."""
        return (self.length_B - back).clamp_min(0) if back else self.length_B

    def visible(self) -> Tensor:
        """Return (B, S), True for the slots that a stream may read in this step: its past and the present."""
        return torch.arange(self.capacity, device=self.length_B.device) <= self.length_B[:, None]

    def steps(self, tokens_per_step: int = 1) -> Tensor:
        """Return the steps (B,) that each stream has seen."""
        if tokens_per_step == 1:
            return self.length_B
        return torch.div(self.length_B, tokens_per_step, rounding_mode="floor")

    def advance(self) -> None:
        self.length_B += 1


@dataclass(slots=True)
class RollingCache(KVCache):
    """Ring buffer of the last S tokens of each stream: when it is full, a new token replaces the oldest one.

    A step may be several tokens. The window holds whole steps: as soon as the first token of a step is written, all
    tokens of the oldest step are hidden.
    """

    tokens_per_step: int = 1

    def window(self) -> Window:
        """Return the slots that this step reads. On a CPU there is a mask only if some slots are hidden."""
        if not self.on_host():
            return Window(self.capacity, self.visible())
        shortest, longest = (int(length) for length in self.length_B.aminmax())
        slots, slot = min(longest + 1, self.capacity), longest % self.capacity if shortest == longest else None
        filled = shortest + 1 >= slots
        ends_step = self.tokens_per_step == 1 or (slot is not None and (slot + 1) % self.tokens_per_step == 0)
        hidden = not filled or not (ends_step or longest < self.capacity)
        return Window(slots, self.visible()[:, :slots] if hidden else None, slot)

    def slot(self, back: int = 0) -> Tensor:
        return (self.length_B - back) % self.capacity

    def visible(self) -> Tensor:
        """Return (B, S), True for the slots that a stream may read: the filled slots of the steps in the window."""
        visible_BS = KVCache.visible(self)
        if self.tokens_per_step == 1:
            return visible_BS
        of_step_B1 = self.length_B[:, None] % self.tokens_per_step
        return visible_BS & (self.distance() <= self.capacity - self.tokens_per_step + of_step_B1)

    def distance(self) -> Tensor:
        """Return the age (B, S) of each slot in tokens, counted from the present token, whose age is 0."""
        return (self.length_B[:, None] - torch.arange(self.capacity, device=self.length_B.device)) % self.capacity
