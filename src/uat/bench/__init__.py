"""Speed of every path beside its slow twin and its peers, in one run: `uat bench`, or `python -m uat.bench`."""

from uat.bench.options import Bench
from uat.bench.run import bench

__all__ = ["Bench", "bench"]
