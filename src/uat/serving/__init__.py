"""Sessions: one trained policy acting in several streams, step by step."""

from uat.serving.session import Session

__all__ = ["Session"]
