"""The paper's studies, one command each."""

from uat.paper.studies.grids import STUDIES, Study
from uat.paper.studies.options import Reproduce
from uat.paper.studies.reproduce import reproduce

__all__ = ["STUDIES", "Reproduce", "Study", "reproduce"]
