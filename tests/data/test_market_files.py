"""Market files: what the check reports, what it refuses, and what passes unchanged."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uat.cli import main
from uat.data import SOURCES
from uat.data.markets.bars import COLUMNS, Bars, accepted, inspect
from uat.data.markets.download import Provider, fetch
from uat.data.markets.panel import align

pl = pytest.importorskip("polars")

DAYS, TICKERS = 40, ("AA", "BB", "CC")


def bars() -> Bars:
    """Three stocks on forty weekdays, day by day."""
    day = np.busday_offset("2020-01-01", np.arange(DAYS), roll="forward").astype("datetime64[D]")
    drift = np.exp(np.random.default_rng(0).normal(0, 0.01, (DAYS, len(TICKERS))).cumsum(0)) * 50
    close = drift.ravel()
    return Bars(
        date=np.repeat(day, len(TICKERS)),
        ticker=np.tile(TICKERS, DAYS),
        open=close * 1.001,
        high=close * 1.02,
        low=close * 0.98,
        close=close,
        volume=np.full(close.size, 1e6),
    )


def changed(**cells: tuple[int, float]) -> Bars:
    """The bars with one cell per column overwritten."""
    found = bars()
    for name, (row, value) in cells.items():
        getattr(found, name)[row] = value
    return found


def save(found: Bars, path: Path, rename: dict[str, str] | None = None) -> Path:
    frame = pl.DataFrame({name: getattr(found, name) for name in COLUMNS}).rename(rename or {})
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def check(*argv: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = 0
    try:
        main(["data", "check", *map(str, argv)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def counts(found: Bars) -> dict[str, int]:
    return {finding.what: finding.count for finding in inspect(found, "x").findings}


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_file_gives_back_what_was_written(suffix: str, tmp_path: Path) -> None:
    from uat.data.markets.files import read

    found, before = read(save(bars(), tmp_path / f"m{suffix}")), bars()
    for name in COLUMNS:
        assert np.array_equal(getattr(found, name), getattr(before, name)), name


def test_dates_may_carry_times_and_zones_and_tickers_may_look_like_numbers(tmp_path: Path) -> None:
    from uat.data.markets.files import read

    found = replace(bars(), ticker=np.tile(["000001", "000002", "600000"], DAYS))
    assert read(save(found, tmp_path / "m.csv")).ticker[0] == "000001"
    frame = pl.DataFrame({name: getattr(found, name) for name in COLUMNS})
    zoned = frame.with_columns(pl.col("date").cast(pl.Datetime("us")).dt.replace_time_zone("Asia/Hong_Kong"))
    zoned.write_parquet(tmp_path / "z.parquet")
    assert np.array_equal(read(tmp_path / "z.parquet").date, found.date)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("close", -3.0, "row 8 (BB, 2020-01-03), column close: -3 is not a positive price"),
        ("open", 0.0, "row 8 (BB, 2020-01-03), column open: 0 is not a positive price"),
        ("volume", -1.0, "row 8 (BB, 2020-01-03), column volume: -1 is not a volume"),
        ("high", 1.0, "row 8 (BB, 2020-01-03), column high: 1 is below low"),
        ("low", np.inf, "row 8 (BB, 2020-01-03), column low: inf is not a positive price"),
    ],
)
def test_impossible_numbers_are_refused_with_row_and_column(
    column: str, value: float, said: str, suffix: str, tmp_path: Path
) -> None:
    from uat.data.markets.files import read

    path = save(changed(**{column: (7, value)}), tmp_path / f"m{suffix}")
    with pytest.raises(ValueError, match="row 8") as refused:
        read(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_renamed_columns_are_refused_and_the_error_lists_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(bars(), tmp_path / "m.csv", {"close": "Adj Close"})
    code, out, err = check("markets", path, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "row 1, column close is not there" in err
    assert "Adj Close" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2020-13-01,AA,1,1,1,1,1", "row 1, column date: '2020-13-01' is not a date"),
        ("2020-01-01,AA,1,1,1,n/a,1", "row 1, column close: 'n/a' is not a number"),
        ("2020-01-01,,1,1,1,1,1", "row 1, column ticker is empty"),
        ("", "not one complete bar"),
    ],
)
def test_unreadable_files_are_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(",".join(COLUMNS) + "\n" + (f"{line}\n" if line else ""))
    from uat.data.markets.files import read

    with pytest.raises(ValueError, match=r"m\.csv") as refused:
        read(path)
    assert said in str(refused.value)


def test_a_day_twice_is_refused() -> None:
    found = bars()
    found.date[6] = found.date[3]
    with pytest.raises(ValueError, match=r"x: row 7 \(AA, 2020-01-02\), column date: the ticker has this day already"):
        accepted(found, "x")


# ---------------------------------------------------------------- the report


def test_a_clean_market_has_no_findings() -> None:
    assert set(counts(bars()).values()) == {0}


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        ({"volume": (7, 0.0)}, "zero volume"),
        ({"volume": (7, np.nan)}, "without a number"),
        ({"open": (7, 1.0)}, "open outside the range"),
        ({"close": (7, 99.0)}, "close outside the range"),
    ],
)
def test_oddities_are_counted_and_kept(cells: dict[str, tuple[int, float]], what: str) -> None:
    found = changed(**cells)
    assert counts(found)[what] == 1
    assert len(accepted(found, "x")) == len(found) - (what == "without a number")


def test_jumps_are_counted_along_a_ticker_whatever_the_order_of_rows() -> None:
    found = bars()
    for name in ("open", "high", "low", "close"):
        getattr(found, name)[30::3] *= 2.0  # a split of AA that was not adjusted
    shuffled = found.take(np.random.default_rng(1).permutation(len(found)))
    assert counts(found)["jumps over 25%"] == counts(shuffled)["jumps over 25%"] == 1


def test_missing_days_count_only_between_a_tickers_first_and_last() -> None:
    found = bars()
    keep = np.ones(len(found), bool)
    keep[[1, 31, 34]] = False  # BB: its first day, and two in the middle
    report = {f.what: f for f in inspect(found.take(keep), "x").findings}
    assert report["missing days"].count == 2
    assert report["missing days"].first == f"BB has no bar on {found.date[31]}"


def test_the_command_prints_a_report_and_exits_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(bars(), tmp_path / "a.parquet")
    save(changed(volume=(0, 0.0)), tmp_path / "b.csv")
    code, out, err = check("markets", tmp_path, "--json", capsys=capsys)
    rows = {(Path(row["file"]).name, row["what"]): row for row in json.loads(out)}
    assert (code, err) == (0, "")
    assert rows["a.parquet", "rows"]["found"] == DAYS * 3
    assert rows["b.csv", "zero volume"]["found"] == 1
    bad = save(changed(close=(7, -3.0)), tmp_path / "bad.csv")
    code, out, err = check("markets", bad, capsys=capsys)
    assert code == 2
    assert "bad close" in out
    assert err == f"uat: {bad}: row 8 (BB, 2020-01-03), column close: -3 is not a positive price\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("market", "."), "markets"),
        (("markets", "nowhere.csv"), "nowhere.csv does not exist"),
        (("markets", "empty"), "empty holds no .parquet or .csv file"),
    ],
)
def test_mistakes_get_one_sentence(
    argv: tuple[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = check(*argv, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_without_polars_the_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ValueError, match=r"pip install 'uat-transformer\[data\]'"):
        SOURCES["markets"].check(tmp_path)


# ---------------------------------------------------------------- one calendar


def suspended() -> Bars:
    """One missing bar (BB), a stock suspended for five days (CC), and a day without volume (AA)."""
    found = changed(volume=(60, 0.0))
    keep = np.ones(len(found), bool)
    keep[[31, *range(77, 92, 3)]] = False
    return found.take(keep)


def test_common_days_are_those_on_which_every_asset_has_a_bar() -> None:
    panel = align(accepted(suspended(), "x"))
    assert (panel.tickers, panel.close_TN.shape) == (TICKERS, (DAYS - 6, 3))
    assert panel.tradable_TN.all()
    assert not set(panel.date_T) & {bars().date[31], *bars().date[77:92:3]}


def test_a_mask_keeps_every_day_and_repeats_the_last_close() -> None:
    panel, whole = align(accepted(suspended(), "x"), "mask"), align(bars())
    assert np.array_equal(panel.date_T, whole.date_T)
    expected = np.ones((DAYS, 3), bool)
    expected[10, 1] = expected[25:30, 2] = expected[20, 0] = False
    assert np.array_equal(panel.tradable_TN, expected)
    for name in ("open", "high", "low", "close"):
        assert (getattr(panel, f"{name}_TN")[25:30, 2] == whole.close_TN[24, 2]).all()
    assert (panel.volume_TN[25:30, 2] == 0).all()
    bar = expected.copy()
    bar[20, 0] = True  # it has its own prices
    assert np.array_equal(panel.close_TN[bar], whole.close_TN[bar])


def test_nothing_is_filled_from_a_later_day() -> None:
    late = bars()
    keep = ~((late.ticker == "BB") & (late.date < late.date[15]))  # BB is listed on the sixth day
    panel = align(late.take(keep), "mask")
    assert panel.date_T[0] == late.date[15]
    assert len(panel.date_T) == DAYS - 5


def test_assets_that_never_meet_are_refused() -> None:
    found = bars()
    keep = np.where(found.ticker == "AA", found.date < found.date[30], found.date >= found.date[30])
    with pytest.raises(ValueError, match="no day on which all 3 tickers"):
        align(found.take(keep))


# ---------------------------------------------------------------- downloads


def test_a_pull_is_cached_with_its_day_and_adjustment_and_never_appended_to(tmp_path: Path) -> None:
    pulls = []

    def pull(ticker: str, start: str, end: str) -> dict[str, Any]:
        pulls.append((ticker, start, end))
        own = bars().take(bars().ticker == ticker)
        scale = len(pulls)  # a later pull rescales the past
        return {n: getattr(own, n) * (scale if n in ("open", "high", "low", "close") else 1) for n in COLUMNS[2:]} | {
            "date": own.date
        }

    ask = {"provider": "yfinance", "start": "2020-01-01", "cache": tmp_path / "cache", "pull": pull}
    first = fetch("us", ["AA"], end="2020-02-01", **ask)
    assert np.array_equal(fetch("us", ["AA"], end="2020-02-01", **ask).close, first.close)
    assert len(pulls) == 1
    note = json.loads((tmp_path / "cache/us.json").read_text())
    assert note["pulled"].startswith("20")
    assert "splits and dividends" in note["adjustment"]
    longer = fetch("us", ["AA"], end="2020-03-01", **ask)
    assert np.array_equal(longer.close, 2 * first.close)  # replaced whole
    assert len(fetch("us", ["AA"], end="2020-03-01", refresh=True, **ask)) == DAYS
    assert len(pulls) == 3


def test_a_provider_that_is_not_installed_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: tuple[tuple[Provider, str], ...] = (("yfinance", "AAPL"), ("akshare", "000001.SZ"))
    for provider, ticker in asked:
        monkeypatch.setitem(sys.modules, provider, None)
        with pytest.raises(ValueError, match=rf"needs {provider}: pip install 'uat-transformer\[markets\]'"):
            fetch("m", [ticker], provider=provider, start="2020-01-01", end="2020-02-01", cache=tmp_path)
