"""Keys and values of all layers, one length per stream: the whole past, or the last steps of it.

In-place writes; on a GPU static shapes, and nothing is read back to the host. What lies past a stream's length is never
read: tests fill it with huge numbers.
Shapes: L layers, 2 (keys, values), B streams, H heads, S capacity, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Window(NamedTuple):
    """What one step reads: the first slots of every stream, and where streams differ which of these each may see."""

    slots: int
    visible_BS: Tensor | None
    """(B, slots); None: all of them, and the last is where this step's key and value go."""


@dataclass(slots=True)
class KVCache:
    kv_L2BHSE: Tensor
    length_B: Tensor
    """Steps that each stream has seen."""
    packed: Any = None
    """The weights as a fused step reads them: those of the moment when this memory was opened. None: no fused step."""

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
        """What this step reads. Where the host may look at lengths for nothing, on a CPU, that is the filled slots."""
        if self.length_B.device.type != "cpu" or not len(self.length_B):
            return Window(self.capacity, self.visible())
        shortest, longest = (int(length) for length in self.length_B.aminmax())
        return Window(longest + 1, None if shortest == longest else self.visible()[:, : longest + 1])

    def write(self, layer: int, k_BHE: Tensor, v_BHE: Tensor, window: Window | None = None) -> tuple[Tensor, Tensor]:
        """Put this step's key and value into each stream's next slot; the keys and values (B, H, S, E) of the layer
        that are in the window, or all."""
        kv_2BHSE = self.kv_L2BHSE[layer]
        if window is not None and window.visible_BS is None:
            kv_2BHSE[0, :, :, window.slots - 1] = k_BHE
            kv_2BHSE[1, :, :, window.slots - 1] = v_BHE
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
    """Keeps the last S steps of each stream: once all slots are taken, all are visible, and the next step goes where
    the oldest lay."""

    def window(self) -> Window:
        return Window(self.capacity, self.visible())

    def slot(self) -> Tensor:
        return self.length_B % self.capacity

    def distance(self) -> Tensor:
        """(B, S) how many steps ago each slot was written, once the present step is; 0 is the present."""
        return (self.length_B[:, None] - torch.arange(self.capacity, device=self.length_B.device)) % self.capacity
