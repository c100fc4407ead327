"""Reports: tables, figures and one page from rows."""

from uat.paper.report.writing import Report, write_report

__all__ = ["Report", "write_report"]
