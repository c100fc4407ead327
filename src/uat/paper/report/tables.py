"""A table and its formats: Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

Rank = int
"""1 for the best of a column, 2 for the second, 0 for all others."""


@dataclass(frozen=True, slots=True)
class Entry:
    text: str
    rank: Rank = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a head; the first column holds names, the others numbers."""

    name: str
    """Name of the table's files."""
    title: str
    note: str = ""
    head: list[str]
    rows: list[list[Entry | str]] = field(default_factory=list)

    def markdown(self) -> str:
        def text(entry: Entry | str) -> str:
            plain, rank = _plain(entry).replace("|", "\\|"), _rank(entry)
            return f"**{plain}**" if rank == 1 else f"<u>{plain}</u>" if rank == 2 else plain

        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)]]
        lines += [[text(entry) for entry in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows([[_plain(entry) for entry in row] for row in self.rows])
        return out.getvalue()

    def latex(self) -> str:
        """A LaTeX table with rules of the booktabs package."""

        def text(entry: Entry | str) -> str:
            plain, rank = _tex(_plain(entry)), _rank(entry)
            return f"\\textbf{{{plain}}}" if rank == 1 else f"\\underline{{{plain}}}" if rank == 2 else plain

        head = " & ".join(_tex(name) for name in self.head) + r" \\"
        body = [" & ".join(text(entry) for entry in row) + r" \\" for row in self.rows]
        inner = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        columns = "l" + "r" * (len(self.head) - 1)
        lines = [r"\begin{table}[t]", r"\centering\footnotesize", rf"\caption{{{_tex(self.title)}. {_tex(self.note)}}}"]
        lines += [rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", *inner, r"\end{tabular}", r"\end{table}"]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        def text(entry: Entry | str) -> str:
            plain, rank = html.escape(_plain(entry)), _rank(entry)
            return f"<b>{plain}</b>" if rank == 1 else f"<u>{plain}</u>" if rank == 2 else plain

        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.head)
        body = "\n".join("<tr>" + "".join(f"<td>{text(entry)}</td>" for entry in row) + "</tr>" for row in self.rows)
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def ranked(texts: Sequence[str], values: Sequence[float | None], *, higher: bool, among: Sequence[bool]) -> list[Entry]:
    """Entries of a column, with the two best of the competing values marked; ties share a rank."""
    competing = {value for value, competes in zip(values, among, strict=True) if competes and value is not None}
    order = sorted(competing, reverse=higher)
    ranks = {value: rank for rank, value in enumerate(order[:2], start=1)} if len(order) > 1 else {}
    return [
        Entry(text, ranks.get(value, 0) if competes and value is not None else 0)
        for text, value, competes in zip(texts, values, among, strict=True)
    ]


def _plain(entry: Entry | str) -> str:
    return entry if isinstance(entry, str) else entry.text


def _rank(entry: Entry | str) -> Rank:
    return 0 if isinstance(entry, str) else entry.rank


TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "σ": r"$\sigma$", "λ": r"$\lambda$"}
TEX["†"] = r"$\dagger$"
TEX |= {"−": "$-$", "Δ": r"$\Delta$", "ρ": r"$\rho$", "‖": r"$\|$", "–": "--", "η": r"$\eta$", "≤": r"$\le$"}


def _tex(text: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in text)
