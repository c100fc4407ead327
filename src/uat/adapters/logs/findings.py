"""Findings of a check: what is odd in a log, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from uat.files import FileError

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One oddity of a log."""

    name: str
    severity: Severity
    """error: the log cannot be used as it is; warning: results may mislead; note: worth knowing."""
    count: int
    """Number of rows, columns or actions that it concerns."""
    sentence: str
    """Numbers, the first place, and advice."""


@dataclass(slots=True)
class Findings:
    """Collects findings. Without `collect`, an error is raised as a FileError, and all others are dropped."""

    collect: bool = False
    found: list[Finding] = field(default_factory=list)

    def error(self, name: str, count: int, sentence: str) -> None:
        if not self.collect:
            raise FileError(sentence)
        self._add(name, "error", count, sentence)

    def warning(self, name: str, count: int, sentence: str) -> None:
        self._add(name, "warning", count, sentence)

    def note(self, name: str, count: int, sentence: str) -> None:
        self._add(name, "note", count, sentence)

    def _add(self, name: str, severity: Severity, count: int, sentence: str) -> None:
        if self.collect:
            self.found.append(Finding(name=name, severity=severity, count=int(count), sentence=sentence))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of checking a log."""

    path: str
    facts: dict[str, Any]
    """Counts and ranges of the log's contents."""
    findings: tuple[Finding, ...]

    @property
    def unsupported_reason(self) -> str | None:
        """One sentence that says why the log cannot be used; None: it can."""
        errors = [finding.sentence for finding in self.findings if finding.severity == "error"]
        more = f" ({len(errors) - 1} more errors)" if errors[1:] else ""
        return f"{errors[0]}{more}" if errors else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per fact and finding, for a table."""
        facts = [
            {"what": name, "severity": "fact", "count": None, "sentence": str(x)} for name, x in self.facts.items()
        ]
        findings = [
            {"what": f.name, "severity": f.severity, "count": f.count, "sentence": f.sentence} for f in self.findings
        ]
        return facts + findings
