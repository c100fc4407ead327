"""MovieLens: any of its published formats, or a synthetic likeness, as one log of arrays.

`load` needs polars (`pip install 'uat-transformer[data]'`); `check` and `fetch` serve the command line.
"""

from uat.data.movielens.fetching import SOURCES, fetch
from uat.data.movielens.genres import GROUPS, group_of
from uat.data.movielens.log import Filters, Log
from uat.data.movielens.sources import Summary, check, load, pack
from uat.data.movielens.synthetic import SyntheticConfig, synthetic

__all__ = [
    "GROUPS",
    "SOURCES",
    "Filters",
    "Log",
    "Summary",
    "SyntheticConfig",
    "check",
    "fetch",
    "group_of",
    "load",
    "pack",
    "synthetic",
]
