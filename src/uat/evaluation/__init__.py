"""Evaluation: scores of runs as rows, their comparison and intervals, tables, and audits of policies."""

from uat.evaluation.auditing import audit
from uat.evaluation.scores import evaluate

__all__ = ["audit", "evaluate"]
