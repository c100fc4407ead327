"""Rule: a contextual bandit whose hidden rule shows through rewards alone."""

from uat.domains.rule.domain import Rule
from uat.domains.rule.world import RuleConfig

__all__ = ["Rule", "RuleConfig"]
