"""Write docs/results/DOMAIN.md from the committed rows, with the published numbers next to ours.

    python results/make_table.py darkroom

The tables are those of `uat report`; methods without rows are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from uat.files import write_atomically
from uat.paper.report.domain_pages import domain_page
from uat.paper.report.rows import Rows

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain")
    parser.add_argument("--preset", default="paper")
    args = parser.parse_args()
    if not (HERE / args.preset / f"{args.domain}.jsonl").exists():
        parser.error(f"there are no rows of {args.domain} under results/{args.preset}: `uat reproduce` writes them")
    write_atomically(DOCS / f"{args.domain}.md", domain_page(Rows.of(HERE / args.preset), args.domain).encode())


if __name__ == "__main__":
    main()
