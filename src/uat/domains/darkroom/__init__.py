"""A dark room: find a goal that is felt through rewards and hardly seen."""

from uat.domains.darkroom.domain import DarkRoom
from uat.domains.darkroom.world import DarkRoomConfig

__all__ = ["DarkRoom", "DarkRoomConfig"]
