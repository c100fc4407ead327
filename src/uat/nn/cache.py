"""Keys and values of all layers, one length per stream: the whole past, or the last steps of it.

Writes are in place; on a GPU shapes are static, and nothing is read back to the host. Slots past a stream's length are
never read: tests fill them with huge numbers.
Shapes: L layers, 2 (keys, values), B streams, H heads, S capacity, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from uat.contracts import Memory

ENDLESS = 2**62
"""A capacity for streams without end; memories that keep a window of steps take it."""


class Window(NamedTuple):
    """The slots that one step reads and writes."""

    slots: int
    """The step reads the first so many slots of every stream."""
    visible_BS: Tensor | None
    """(B, slots) True for the slots that a stream may read; None: all of them."""
    slot: int | None = None
    """Where the keys and values of this step go, if that is the same slot in all streams and known to the host."""


@dataclass(slots=True)
class KVCache(Memory):
    kv_L2BHSE: Tensor
    length_B: Tensor
    """Steps that each stream has seen."""

    @classmethod
    def empty(cls, *, layers: int, streams: int, heads: int, capacity: int, d_head: int, like: Tensor) -> Self:
        """Of the device and type of `like`."""
        return cls(
            kv_L2BHSE=like.new_zeros(layers, 2, streams, heads, capacity, d_head),
            length_B=torch.zeros(streams, dtype=torch.long, device=like.device),
        )

    @property
    def capacity(self) -> int:
        return self.kv_L2BHSE.shape[-2]

    def restart(self, first_B: Tensor) -> None:
        """Streams that start anew forget everything; the others are left alone."""
        self.length_B.masked_fill_(first_B, 0)

    def window(self) -> Window:
        """The slots that this step reads: on a CPU, where the host reads lengths at no cost, only the filled ones."""
        if not self.on_host():
            return Window(self.capacity, self.visible())
        shortest, longest = (int(length) for length in self.length_B.aminmax())
        if shortest == longest:
            return Window(longest + 1, None, longest)
        return Window(longest + 1, self.visible()[:, : longest + 1])

    def on_host(self) -> bool:
        """Whether the host can read lengths at no cost, and there are any."""
        return self.length_B.device.type == "cpu" and len(self.length_B) > 0

    def write(self, layer: int, k_BHE: Tensor, v_BHE: Tensor, window: Window | None = None) -> tuple[Tensor, Tensor]:
        """Put this step's key and value into each stream's next slot. Return the layer's keys and values (B, H, S, E)
        that lie in the window, or all."""
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

    def slot(self) -> Tensor:
        """(B,) where each stream's next step goes."""
        return self.length_B

    def visible(self) -> Tensor:
        """(B, S) True for the slots a stream may read in this step: its past and the present."""
        return torch.arange(self.capacity, device=self.length_B.device) <= self.length_B[:, None]

    def advance(self) -> None:
        self.length_B += 1


@dataclass(slots=True)
class RollingCache(KVCache):
    """Keeps the last S tokens of each stream: once all slots are taken, the next token goes where the oldest lay.

    A step may be several tokens. The window holds whole steps: as soon as a step's first token has come, no token of
    the oldest step is visible any more.
    """

    tokens_per_step: int = 1

    def window(self) -> Window:
        """The slots that this step reads. On a CPU a mask is made only where there is something to hide."""
        if not self.on_host():
            return Window(self.capacity, self.visible())
        shortest, longest = (int(length) for length in self.length_B.aminmax())
        slots, slot = min(longest + 1, self.capacity), longest % self.capacity if shortest == longest else None
        filled = shortest + 1 >= slots
        ends_step = self.tokens_per_step == 1 or (slot is not None and (slot + 1) % self.tokens_per_step == 0)
        hidden = not filled or not (ends_step or longest < self.capacity)
        return Window(slots, self.visible()[:, :slots] if hidden else None, slot)

    def slot(self) -> Tensor:
        return self.length_B % self.capacity

    def visible(self) -> Tensor:
        """(B, S) True for the slots a stream may read in this step: filled ones of the steps in the window."""
        visible_BS = KVCache.visible(self)
        if self.tokens_per_step == 1:
            return visible_BS
        of_step_B1 = self.length_B[:, None] % self.tokens_per_step
        return visible_BS & (self.distance() <= self.capacity - self.tokens_per_step + of_step_B1)

    def distance(self) -> Tensor:
        """(B, S) how many tokens ago each slot was written, once the present token is; 0 is the present."""
        return (self.length_B[:, None] - torch.arange(self.capacity, device=self.length_B.device)) % self.capacity
