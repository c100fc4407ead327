"""Portfolios across three markets, allocated by one policy."""

from uat.domains.markets.domain import Markets
from uat.domains.markets.world import MarketsConfig, MarketsSimulator

__all__ = ["Markets", "MarketsConfig", "MarketsSimulator"]
