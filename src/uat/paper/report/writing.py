"""Write a report: one self-contained page, and a file for every table and figure."""

from __future__ import annotations

import csv
import html
import importlib
import io
import re
import xml.etree.ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uat import __version__
from uat.domains import DOMAINS
from uat.files import check_name, write_atomically
from uat.lock import locked
from uat.methods import METHODS
from uat.paper.report import binding_tables, family_tables, score_tables, study_tables
from uat.paper.report.figures import DRAWINGS, STYLE, Drawing, MissingError, need_matplotlib
from uat.paper.report.rows import Rows
from uat.paper.report.tables import Table
from uat.paper.studies.grids import STUDIES, with_ablations


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Files of a report."""

    page: Path
    tables: list[str]
    figures: list[str]
    missing: dict[str, str] = field(default_factory=dict)
    """Figure or table -> the command that measures its rows."""


@dataclass(slots=True)
class Section:
    study: str
    tables: list[Table] = field(default_factory=list)
    figures: list[tuple[Drawing, str]] = field(default_factory=list)
    """Figures, each with its SVG text."""
    missing: dict[str, str] = field(default_factory=dict)


FIGURES_OF = {
    "main": ["main"],
    "boundary": ["boundary", "curves"],
    "binding": ["binding"],
    "mechanism": ["attention", "terms", "gate", "kinetics"],
    "sensitivity": ["sensitivity"],
    "diagnostics": ["diagnostics"],
    "efficiency": ["efficiency"],
}


def write_report(folder: Path, out: Path | None = None, *, preset: str | None = None) -> Report:
    """Write tables and figures of a folder of results to `out`, by default its folder `report`."""
    need_matplotlib()
    rows, out = Rows.of(folder, preset), out or folder / "report"
    with locked(out, f"a report of {folder}"):
        sections = [section(rows, study, out) for study in STUDIES]
        for one in sections:
            for table in one.tables:
                name = check_name(table.name, "the table")
                for ending, text in (("md", table.markdown() + "\n"), ("csv", table.csv()), ("tex", table.latex())):
                    write_atomically(out / "tables" / f"{name}.{ending}", text.encode())
        write_atomically(out / "numbers.csv", numbers(rows).encode())
        write_atomically(out / "report.md", markdown(rows, sections).encode())
        write_atomically(out / "index.html", page(rows, sections).encode())
    return Report(
        page=out / "index.html",
        tables=[table.name for one in sections for table in one.tables],
        figures=[drawing.name for one in sections for drawing, _ in one.figures],
        missing={name: command for one in sections for name, command in one.missing.items()},
    )


def section(rows: Rows, study: str, out: Path) -> Section:
    """Tables and figures of one study."""
    result = Section(study, tables=tables_of(rows, study))
    if not result.tables:
        result.missing[f"tables of {study}"] = f"uat reproduce {study} --preset {rows.preset}"
    for drawing in DRAWINGS:
        if drawing.name in FIGURES_OF.get(study, []):
            try:
                result.figures.append((drawing, save_figure(drawing, rows, out / "figures")))
            except MissingError as command:
                result.missing[f"figure {drawing.name}"] = f"{command} --preset {rows.preset}"
    return result


def tables_of(rows: Rows, study: str) -> list[Table]:
    result: list[Table | None] = []
    match study:
        case "main":
            for domain in DOMAINS:
                result += score_tables.domain_tables(rows, domain, lambda m: not METHODS[m].ablation, "main")
                result.append(score_tables.rivals_table(rows, domain, lambda m: not METHODS[m].ablation))
                result.append(family_tables.main_family_table(rows, domain))
                result.append(score_tables.pairs_table(rows, domain))
            result.append(score_tables.aggregate_table(rows))
        case "ablation":
            for domain in DOMAINS:
                tables = score_tables.domain_tables(rows, domain, with_ablations("uat"), "ablation")
                result += [t for t in tables if len([row for row in t.rows if row[0] in METHODS]) > 1]
        case "boundary":
            for domain in DOMAINS:
                result += study_tables.boundary_tables(rows, domain)
                result.append(family_tables.boundary_family_table(rows, domain))
        case "binding":
            result += binding_tables.binding_tables(rows)
            result.append(family_tables.binding_family_table(rows))
        case "binding-rates":
            result.append(binding_tables.rates_table(rows))
        case "plus":
            result.append(binding_tables.plus_table(rows))
        case "mechanism":
            result += [
                study_tables.attention_table(rows),
                study_tables.terms_table(rows),
                study_tables.gate_table(rows),
                study_tables.shocks_table(rows),
            ]
            result.append(study_tables.kinetics_table(rows))
        case "sensitivity":
            result.append(study_tables.sensitivity_table(rows))
        case "efficiency":
            result.append(study_tables.efficiency_table(rows))
        case "diagnostics":
            result += score_tables.diagnostics_tables(rows)
    return [table for table in result if table is not None]


def save_figure(drawing: Drawing, rows: Rows, folder: Path) -> str:
    """Save a figure as SVG and PNG; return the SVG text."""
    matplotlib: Any = importlib.import_module("matplotlib")
    with matplotlib.rc_context(STYLE):
        figure = drawing.draw(rows)
        images: dict[str, bytes] = {}
        for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 160})):
            out = io.BytesIO()
            figure.savefig(out, format=ending, **options)
            images[ending] = out.getvalue()
    for ending, content in images.items():
        write_atomically(folder / f"{drawing.name}.{ending}", content)
    return images["svg"].decode()


def numbers(rows: Rows) -> str:
    """All measurements as CSV: one line per method, setting and metric, with the published number if there is one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["domain", "task", "setting", "method", "metric", "mean", "std", "low", "high", "gap_closed", "seeds", "n"]
    writer.writerow([*head, "published", "published_std", "difference"])
    for key in rows.values:
        x, published = rows.number(key), rows.published_number(key)
        assert x is not None
        ours = [x.mean, x.std, x.low, x.high, x.gap, len(x.seeds), x.n]
        difference = None if published is None else x.mean - published[0]
        writer.writerow([*key, *ours, *(published or (None, None)), difference])
    return out.getvalue()


# ---------------------------------------------------------------- the pages


def markdown(rows: Rows, sections: list[Section]) -> str:
    parts = ["# Results", about(rows)]
    for one in sections:
        parts.append(f"## {one.study.capitalize()}\n\n{_sentence(STUDIES[one.study].summary)}.")
        for drawing, _ in one.figures:
            parts.append(f"![{drawing.title}](figures/{drawing.name}.svg)\n\n*{drawing.title}.* {drawing.caption}")
        for table in one.tables:
            parts.append(f"### {table.title}\n\n{table.markdown()}\n\n{table.note}".rstrip())
        parts += [f"*Not measured yet: {what} (`{command}`).*" for what, command in one.missing.items()]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    """The text with a capital first letter; names inside keep theirs."""
    return text[:1].upper() + text[1:]


def about(rows: Rows) -> str:
    """Introduction of the page."""
    data = "".join(f" Rows of {domain} use the data {name}." for domain, name in rows.data.items())
    return (
        f"Generated by `uat report {rows.folder}` (uat {__version__}) from {len(rows.scores):,} rows measured with the "
        f"preset {rows.preset}. {score_tables.OURS} Δ is ours minus published. The published numbers come from other "
        f"simulators, data and hardware, and are shown for orientation. {score_tables.LEGEND}{data}{rows.flaw_notes()}"
    )


CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 2px solid #0072B2; padding-top: .6rem; margin-top: 2.4rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
nav a { margin-right: 1rem; } a { color: #0072B2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .18rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #555;
  white-space: normal; vertical-align: bottom; }
tbody tr:nth-child(even) { background: #f6f8fa; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: 13px; }
.missing { border-left: 4px solid #D55E00; padding: .3rem .8rem; background: #fff6f0; }
code { background: #f2f2f2; padding: 0 .2em; }
@media print { body { max-width: none; font-size: 10pt; margin: 0; } nav { display: none; } h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } table { font-size: 8pt; } }
"""


def page(rows: Rows, sections: list[Section]) -> str:
    """The page as one HTML file, without external scripts, fonts or images."""
    parts = [f"<h1>Results</h1>\n<p>{_code(about(rows))}</p>"]
    parts.append("<nav>" + "".join(f'<a href="#{one.study}">{one.study}</a>' for one in sections) + "</nav>")
    for one in sections:
        parts.append(f'<h2 id="{one.study}">{one.study.capitalize()}</h2>')
        parts.append(f"<p>{html.escape(_sentence(STUDIES[one.study].summary))}.</p>")
        for drawing, svg in one.figures:
            caption = f"<b>{html.escape(drawing.title)}.</b> {html.escape(drawing.caption)}"
            parts.append(f"<figure>{inline(svg, drawing)}<figcaption>{caption}</figcaption></figure>")
        for table in one.tables:
            parts.append(f"<h3>{html.escape(table.title)}</h3>\n<div class=wide>{table.html()}</div>")
            parts.append(f"<p class=note>{html.escape(table.note)}</p>" if table.note else "")
        for what, command in one.missing.items():
            parts.append(f"<p class=missing>Not measured yet: {html.escape(what)} (<code>{command}</code>)</p>")
    body = "\n".join(part for part in parts if part)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>uat: results</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n'


def inline(svg: str, drawing: Drawing) -> str:
    """An SVG figure for embedding in the page; its ids get a prefix, since several figures share the page."""
    svg = svg[svg.index("<svg") :]
    names = set(re.findall(r'\bid="([^"]+)"', svg))
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{drawing.name}-\1"', svg)
    svg = re.sub(
        r"(url\(#|href=\"#)([^)\"]+)", lambda m: m[1] + (f"{drawing.name}-" if m[2] in names else "") + m[2], svg
    )
    xml.etree.ElementTree.fromstring(svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(drawing.title)}"', 1)


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
