"""Map genre tags to one of four preference groups, merged by hand as the paper says."""

from __future__ import annotations

from collections.abc import Iterable

from uat.settings import shown

GROUPS: tuple[tuple[str, ...], ...] = (
    ("Action", "Adventure", "Sci-Fi", "War", "Western", "Fantasy", "IMAX"),
    ("Comedy", "Children", "Animation", "Musical"),
    ("Drama", "Romance", "Documentary"),
    ("Thriller", "Crime", "Mystery", "Horror", "Film-Noir"),
)
UNTAGGED = 2
"""The group of items without a tag."""

NO_TAG = frozenset({"", "unknown", "(no genres listed)"})
SPELLINGS = {"Children's": "Children"}
GROUP_OF_TAG = {tag: group for group, tags in enumerate(GROUPS) for tag in tags}


def is_tag(tag: str) -> bool:
    """Whether the tag names a genre, rather than saying that there is none."""
    return tag.strip() not in NO_TAG


def group_of(tags: Iterable[str]) -> int:
    """The group that most tags belong to; the last of them on a tie; UNTAGGED without tags."""
    votes = [0] * len(GROUPS)
    for tag in tags:
        if not is_tag(tag):
            continue
        name = SPELLINGS.get(tag.strip(), tag.strip())
        if name not in GROUP_OF_TAG:
            raise ValueError(f"unknown genre {shown(name)}; known: {', '.join(GROUP_OF_TAG)}")
        votes[GROUP_OF_TAG[name]] += 1
    if not any(votes):
        return UNTAGGED
    return max(range(len(GROUPS)), key=lambda group: (votes[group], group))
