"""Evaluation: runs become rows, rows become tables and pages."""

from uat.evaluation.scores import evaluate

__all__ = ["evaluate"]
