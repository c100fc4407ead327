"""DarkRoom: find a goal that shows mostly through rewards."""

from uat.domains.darkroom.domain import DarkRoom
from uat.domains.darkroom.world import DarkRoomConfig

__all__ = ["DarkRoom", "DarkRoomConfig"]
