"""Evaluation: runs become rows, rows become tables and pages; policies are audited and looked into."""

from uat.evaluation.auditing import audit
from uat.evaluation.scores import evaluate

__all__ = ["audit", "evaluate"]
