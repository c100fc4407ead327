"""MovieLens: any of its published formats, or a synthetic likeness, as one log of arrays.

`load` needs polars (`pip install 'uat-transformer[data]'`) unless a file is packed already. Downloads are apart
(`fetching`), since what they import takes time.
"""

from uat.data.movielens.genres import GROUPS, group_of
from uat.data.movielens.log import Filters, Log
from uat.data.movielens.sources import Summary, check, load, pack
from uat.data.movielens.synthetic import SyntheticConfig, synthetic

__all__ = [
    "GROUPS",
    "Filters",
    "Log",
    "Summary",
    "SyntheticConfig",
    "check",
    "group_of",
    "load",
    "pack",
    "synthetic",
]
