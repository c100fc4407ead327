"""Executors: run many trainings in this process, in local processes, or on a Ray cluster."""

from uat.executors.jobs import Do, Job, Note, Outcome, keep_failure, run_job
from uat.executors.kinds import Executor, ExecutorName, InProcess, Pool, Ray, check_executor, executor_for

__all__ = [
    "Do",
    "Executor",
    "ExecutorName",
    "InProcess",
    "Job",
    "Note",
    "Outcome",
    "Pool",
    "Ray",
    "check_executor",
    "executor_for",
    "keep_failure",
    "run_job",
]
