"""Studies: the paper's questions, one command each."""

from uat.studies.grids import STUDIES, Study
from uat.studies.options import Reproduce
from uat.studies.reproduce import reproduce

__all__ = ["STUDIES", "Reproduce", "Study", "reproduce"]
