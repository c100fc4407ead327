"""Benchmark every execution path against the plain one and other libraries: `uat bench`, or `python -m uat.bench`."""

from uat.bench.options import Bench
from uat.bench.run import bench

__all__ = ["Bench", "bench"]
