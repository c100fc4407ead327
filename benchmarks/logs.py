"""Measure how fast a log is checked and read, and how much memory that takes.

    python benchmarks/logs.py --rows 10000000 --format parquet
    python benchmarks/logs.py --rows 10000000 --format csv

Each part runs in a process of its own, so that its peak of resident memory is its own: generate the log, check it,
train a small policy from it for four epochs, and read the same file with pandas, if that is installed. The file is
written to a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PIECE = 40_000
"""Episodes that are generated at a time."""
STEPS = 25


def generate(file: Path, rows: int) -> dict[str, Any]:
    """Write a log with a hidden regime in pieces, and join them."""
    import polars as pl

    from uat.adapters.logs.examples import frame, hidden_regime

    episodes, pieces = rows // STEPS, []
    for begin in range(0, episodes, PIECE):
        columns = hidden_regime(min(PIECE, episodes - begin), STEPS, seed=begin).columns
        pieces.append(file.with_name(f"piece-{begin:09d}.arrow"))
        frame({**columns, "customer": columns["customer"] + begin}).write_ipc(pieces[-1])
    whole = pl.concat([pl.scan_ipc(piece) for piece in pieces])
    if file.suffix == ".csv":
        whole.sink_csv(file)
    else:
        whole.sink_parquet(file)
    for piece in pieces:
        piece.unlink()
    return {"bytes": file.stat().st_size}


def check(file: Path, rows: int) -> dict[str, Any]:
    from uat.adapters.logs import LogsConfig
    from uat.adapters.logs import check as check_log
    from uat.adapters.logs.examples import ROLES

    found = check_log(LogsConfig(path=str(file), **ROLES))
    assert found.unsupported_reason is None, found.unsupported_reason
    return {"findings": [finding.name for finding in found.findings]}


def train(file: Path, rows: int) -> dict[str, Any]:
    """Read the log and train a small policy for four epochs, with one validation of 256 windows."""
    import uat
    from uat.adapters.logs import LogsConfig, LogsDomain
    from uat.adapters.logs.examples import ROLES

    began = time.perf_counter()
    domain = LogsDomain(LogsConfig(path=str(file), validation_windows=256, **ROLES))
    read = time.perf_counter() - began
    settings = {"train.validate_every": 4}
    run = uat.train(domain, file.parent / "run", preset="smoke", settings=settings, device="cpu")
    return {
        "read_seconds": round(read, 1),
        "log_likelihood": run.rows("metrics.jsonl")[-1]["validation/log_likelihood"],
    }


def pandas(file: Path, rows: int) -> dict[str, Any]:
    import pandas as pd  # pyright: ignore[reportMissingImports]

    table = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
    return {"rows": len(table)}


def polars(file: Path, rows: int) -> dict[str, Any]:
    """Read the whole file into one frame of polars, without checks."""
    import polars as pl

    return {"rows": len(pl.read_csv(file) if file.suffix == ".csv" else pl.read_parquet(file))}


PARTS = {"generate": generate, "polars": polars, "pandas": pandas, "check": check, "train": train}


def measured(part: str, file: Path, rows: int) -> dict[str, Any]:
    """Run a part in a process of its own."""
    if part == "pandas" and importlib.util.find_spec("pandas") is None:
        return {"part": part, "skipped": "pandas is not installed"}
    command = [sys.executable, __file__, "--part", part, "--file", str(file), "--rows", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{part}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--format", choices=["parquet", "csv"], default="parquet")
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if options.part:
        import torch  # imported before the clock starts

        import uat.training

        assert torch.__version__, uat.training
        began = time.perf_counter()
        result = PARTS[options.part](options.file, options.rows)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = {"part": options.part, "seconds": round(seconds, 1), "peak_gib": round(peak, 2)}
        print(json.dumps({**row, "rows_per_second": round(options.rows / seconds), **result}))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"events.{options.format}"
        for part in PARTS:
            print(json.dumps(measured(part, file, options.rows)), flush=True)


if __name__ == "__main__":
    main()
