"""Acting live: one trained policy, several streams."""

from uat.serving.session import Session

__all__ = ["Session"]
