"""Oddities of a log are found, and nothing else is; unusable logs are refused with file, row and column."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uat.adapters.logs import LogsConfig, check
from uat.adapters.logs.examples import OBSERVED, OFFERS, TRAPS, Example, hidden_regime, write
from uat.adapters.logs.files import Log, digest
from uat.adapters.logs.findings import Findings
from uat.adapters.logs.table import read
from uat.adapters.logs.traps import cramer, explained, given_away, grouped
from uat.cli import main
from uat.files import FileError

EXAMPLE = hidden_regime(400, 25)


def config_of(path: Path, example: Example = EXAMPLE, **settings: Any) -> LogsConfig:
    return LogsConfig(path=str(path), **{**example.roles, **settings})


def names(checked: Any) -> set[str]:
    return {finding.name for finding in checked.findings}


# ---------------------------------------------------------------- findings


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_clean_logs_raise_nothing(seed: int, suffix: str, tmp_path: Path) -> None:
    path = write(hidden_regime(400, 25, seed=seed), tmp_path / f"log{suffix}")
    assert check(config_of(path)).findings == ()


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_is_caught(trap: str, tmp_path: Path) -> None:
    example = TRAPS[trap](EXAMPLE)
    path = write(example, tmp_path / "log.parquet")
    checked = check(config_of(path, example, observations=OBSERVED.get(trap, ())))
    assert names(checked) == {trap}
    [finding] = checked.findings
    assert finding.count > 0
    assert any(character.isdigit() for character in finding.sentence)
    cannot = {"duplicate-steps", "propensities", "missing-values"}
    assert (checked.unsupported_reason is not None) == (trap in cannot)


def test_traps_are_gone_after_following_the_advice(tmp_path: Path) -> None:
    cures: dict[str, dict[str, Any]] = {
        "reward-leak": {"observations": ("x*", "region")},
        "action-leak": {"observations": ("x*", "region")},
        "next-step-leak": {"observations": ("x*", "region")},
        "confounding": {},
        "gaps": {"gaps": "split"},
        "duplicate-steps": {"duplicates": "first"},
        "missing-values": {"missing": "fill"},
    }
    for trap, cure in cures.items():
        example = TRAPS[trap](EXAMPLE)
        path = write(example, tmp_path / f"{trap}.parquet")
        assert names(check(config_of(path, example, **cure))) == set(), trap


def test_raw_scales_are_a_warning_only_if_nothing_standardises_them(tmp_path: Path) -> None:
    example = TRAPS["raw-scales"](EXAMPLE)
    path = write(example, tmp_path / "log.parquet")
    severity = [check(config_of(path, example, standardise=own)).findings[0].severity for own in (True, False)]
    assert severity == ["note", "warning"]


def test_a_leaked_action_of_the_next_step_is_found(tmp_path: Path) -> None:
    code_N, customer_N = EXAMPLE.columns["offer"].code_N, EXAMPLE.columns["customer"]
    later_N = np.where(np.roll(customer_N, -1) == customer_N, np.roll(code_N, -1), code_N)
    path = write(EXAMPLE.having(plan=later_N), tmp_path / "log.parquet")
    assert names(check(config_of(path))) == {"next-step-leak"}


def test_features_of_the_past_are_not_leaks(tmp_path: Path) -> None:
    """The last reward, the last action and a running mean are known at the decision."""
    first_N = EXAMPLE.columns["day"] == 0
    before = {f"last_{n}": np.where(first_N, 0, np.roll(EXAMPLE.columns[n], 1)) for n in ("clicked", "x0")}
    code_N = np.where(first_N, 4, np.roll(EXAMPLE.columns["offer"].code_N, 1))
    path = write(EXAMPLE.having(**before, last_offer=[(*OFFERS, "-")[c] for c in code_N]), tmp_path / "log.parquet")
    assert check(config_of(path)).findings == ()


@given(seed=st.integers(0, 2**31), groups=st.integers(2, 60))
@settings(max_examples=20, deadline=None)
def test_associations_of_independent_columns_are_far_below_the_thresholds(seed: int, groups: int) -> None:
    generator = np.random.default_rng(seed)
    value_N = generator.standard_normal(3000) if groups > 30 else generator.integers(0, groups, 3000).astype(float)
    action_N, reward_N = generator.integers(0, 4, 3000), generator.standard_normal(3000)
    group_N = grouped(value_N)
    share, without = given_away(group_N, action_N)
    assert share < without + 0.1
    assert explained(group_N, reward_N) < 0.05
    assert cramer(group_N, action_N) < 0.1
    assert given_away(action_N, action_N)[0] == 1
    assert cramer(action_N, action_N) == pytest.approx(1, abs=0.01)
    assert explained(grouped(reward_N), reward_N) > 0.95


def test_what_the_generator_says_is_true() -> None:
    n = np.arange(len(EXAMPLE.best_N))
    code_N, clicked_N = EXAMPLE.columns["offer"].code_N, EXAMPLE.columns["clicked"]
    hit_N = code_N == EXAMPLE.best_N
    assert clicked_N[hit_N].mean() == pytest.approx(0.8, abs=0.03)
    assert clicked_N[~hit_N].mean() == pytest.approx(0.2, abs=0.02)
    assert (EXAMPLE.value_NA.argmax(1) == EXAMPLE.best_N).all()
    assert np.allclose(EXAMPLE.probability_NA.sum(1), 1, atol=1e-5)
    assert np.allclose(EXAMPLE.columns["propensity"], EXAMPLE.probability_NA[n, code_N])
    shares = [(EXAMPLE.probability_NA[n, code_N] ** -1 * (code_N == a)).mean() for a in range(4)]
    assert shares == pytest.approx([1] * 4, abs=0.1)  # propensities are probabilities of what was done
    switched = np.diff(EXAMPLE.regime_N.reshape(400, 25), axis=1) != 0
    assert switched.mean() == pytest.approx(0.05, abs=0.01)


# ---------------------------------------------------------------- logs that cannot be used

TABLE: dict[str, Any] = {
    "who": [i // 4 for i in range(160)],
    "when": [i % 4 for i in range(160)],
    "x": [float(i % 7) for i in range(160)],
    "kind": ["a", "b"] * 80,
    "did": ["up", "down", "up", "stay"] * 40,
    "earned": [0.0, 1.0] * 80,
    "chance": [0.5] * 160,
    "part": ["train"] * 120 + ["validation"] * 20 + ["test"] * 20,
}
ROLES: dict[str, Any] = {
    "episode": "who",
    "time": "when",
    "action": ("did",),
    "reward": "earned",
    "propensity": "chance",
    "split": "column",
    "split_column": "part",
}


def changed(row: int, column: str, value: Any) -> dict[str, Any]:
    """The table with one value changed."""
    values = list(TABLE[column])
    values[row] = value
    return {**TABLE, column: values}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no column": (TABLE, {"reward": "earnd"}, r"has no column 'earnd' \(domain.reward\); did you mean 'earned'\?"),
    "no match": (
        TABLE,
        {"observations": ("y*",)},
        r"no column matches 'y\*' of domain.observations; its columns are who,",
    ),
    "nothing to decide": (TABLE, {"action": ()}, "domain.action is empty: name the column of the action"),
    "action observed": (TABLE, {"observations": ("x", "did")}, "matches did, which is the action"),
    "duplicate": (
        changed(5, "when", 0),
        {},
        r"row 6, column when: 1 rows repeat .* those of row 5; remove them, or keep",
    ),
    "nan": (changed(9, "x", float("nan")), {}, "row 10, column x is nan, not a finite number, as in 1 of 160 rows"),
    "infinite": (changed(9, "x", float("inf")), {"missing": "fill"}, "row 10, column x is inf, not a finite number"),
    "empty": (changed(9, "kind", None), {}, "row 10, column kind is empty, as in 1 of 160 rows"),
    "no episode": (changed(9, "who", None), {}, "row 10, column who is empty: every row needs an episode"),
    "no time": (changed(9, "when", None), {}, "row 10, column when: None is not a time; write numbers"),
    "no date": (
        {**TABLE, "when": ["soon"] * 160},
        {},
        "row 1, column when: 'soon' is not a time; write numbers, dates",
    ),
    "no action": (changed(9, "did", None), {}, "row 10, column did is empty: every step needs the action"),
    "unseen action": (
        changed(150, "did", "jump"),
        {},
        r"row 151, column did: the action 'jump' never occurs in the train",
    ),
    "unlisted action": (
        TABLE,
        {"actions": ("up", "down")},
        "row 4, column did: the action 'stay' never occurs in domain.ac",
    ),
    "one action": ({**TABLE, "did": ["up"] * 160}, {}, "has the one action up: there is nothing to decide"),
    "reward": (changed(3, "earned", float("nan")), {}, "row 4, column earned: the reward is nan, not a finite number"),
    "propensity 0": (changed(3, "chance", 0.0), {}, r"row 4, column chance: the propensity is 0.0, outside \(0, 1\]"),
    "propensity 1.5": (changed(3, "chance", 1.5), {}, r"row 4, column chance: the propensity is 1.5, outside \(0, 1\]"),
    "no split": (changed(3, "part", "trian"), {}, "row 4, column part: 'trian' is not a split; write train"),
    "empty split": ({**TABLE, "part": ["train"] * 80 + ["test"] * 80}, {}, "the validation part is empty: 40 episodes"),
    "no training": ({**TABLE, "part": ["validation", "test"] * 80}, {}, "the train part is empty"),
    "gap": (
        {**TABLE, "when": [i % 4 + (i == 159) for i in range(160)]},
        {"gaps": "refuse"},
        "row 160, column when: 1 steps come later than the usual 1",
    ),
    "end": (
        {**TABLE, "over": [i % 4 == 2 for i in range(160)]},
        {"done": "over"},
        "row 3, column over ends the episode, but",
    ),
    "flag": (
        {**TABLE, "over": ["maybe"] * 160},
        {"done": "over"},
        "row 1, column over: 'maybe' is neither true nor false",
    ),
    "dates": (
        {**TABLE, "born": [datetime.date(2000, 1, 1)] * 160},
        {},
        "row 1, column born holds dates or times, which cannot be observed: leave it out",
    ),
    "limits": (
        {**TABLE, "did": [i / 160 for i in range(160)]},
        {"action_kind": "numbers", "low": (0.0,), "high": (0.5,)},
        r"row 82, column did: the action 0.50625 is outside \[0, 0.5\]; set domain.low",
    ),
    "not allowed": (
        {**TABLE, "can": ["up|down"] * 160},
        {"allowed": ("can",)},
        "row 4, column can: the logged action 'stay' is not among the allowed ones, as in 40 rows",
    ),
    "weights": (
        {**TABLE, "a": [0.5] * 160, "b": [0.6] * 160},
        {"action": ("a", "b"), "action_kind": "weights"},
        "row 1, column a: weights must not be negative and sum to 1, got a sum of 1.1",
    ),
}


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("case", CASES)
def test_a_log_that_cannot_be_used_is_refused_in_one_sentence(case: str, suffix: str, tmp_path: Path) -> None:
    columns, settings, sentence = CASES[case]
    path = tmp_path / f"log{suffix}"
    frame = pl.DataFrame(columns, strict=False)
    if suffix == ".csv":
        frame.write_csv(path)
        sentence = sentence.replace("is nan", "is 'NaN'").replace("is inf", "is 'inf'").replace("0.0,", "'0.0',")
        sentence = sentence.replace("1.5,", "'1.5',")
        if case == "dates":
            pytest.skip("dates are categories in CSV")
    else:
        frame.write_parquet(path)
    config = LogsConfig(path=str(path), **{**ROLES, **settings})
    with pytest.raises(FileError, match=sentence) as error:
        read(config)
    assert "\n" not in str(error.value)
    checked = check(config)
    assert checked.unsupported_reason is not None
    assert str(error.value) in {finding.sentence for finding in checked.findings}


def test_the_table_of_these_cases_is_fine_itself(tmp_path: Path) -> None:
    pl.DataFrame(TABLE).write_parquet(tmp_path / "log.parquet")
    table = read(LogsConfig(path=str(tmp_path / "log.parquet"), **ROLES))
    assert table.facts["rows"] == 160
    assert table.preparation.action_names == ("down", "stay", "up")


def test_mixed_types_in_a_column(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", changed(7, "x", "n/a"))
    config = LogsConfig(path=str(tmp_path / "log.csv"), **ROLES)
    with pytest.raises(FileError, match=r"log\.csv: row 8, column x: 'n/a' is not a number, but 159 of 160 values"):
        read(config)
    assert names(check(config)) >= {"mixed-types"}
    as_category = LogsConfig(path=str(tmp_path / "log.csv"), categories=("x",), **ROLES)
    assert "n/a" in read(as_category).preparation.categories["x"]


def write_csv(path: Path, columns: dict[str, Any]) -> None:
    pl.DataFrame({n: [None if x is None else str(x) for x in values] for n, values in columns.items()}).write_csv(path)


def test_the_row_is_that_of_its_own_file(tmp_path: Path) -> None:
    frame = pl.DataFrame(changed(130, "chance", 2.0))
    frame[:100].write_parquet(tmp_path / "a.parquet")
    frame[100:].write_parquet(tmp_path / "b.parquet")
    with pytest.raises(FileError, match=r"b\.parquet: row 31, column chance: the propensity is 2\.0"):
        read(LogsConfig(path=str(tmp_path), **ROLES))


def test_files_of_a_folder_must_be_alike(tmp_path: Path) -> None:
    pl.DataFrame(TABLE).write_parquet(tmp_path / "a.parquet")
    pl.DataFrame(TABLE).drop("x").write_parquet(tmp_path / "b.parquet")
    config = LogsConfig(path=str(tmp_path), **ROLES)
    with pytest.raises(FileError, match=r"b\.parquet: row 1, column x is not there, but .*a\.parquet has it"):
        read(config)
    pl.DataFrame({**TABLE, "x": ["1"] * 160}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(FileError, match=r"b\.parquet: row 1, column x is String, but Float64 in .*a\.parquet"):
        read(config)
    (tmp_path / "c.csv").write_text("x\n1\n")
    with pytest.raises(FileError, match=r"files of the kinds \.csv, \.parquet: expected files of one kind"):
        read(config)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("log.parquet", b"PAR1nonsense", "cannot be read"),
        ("log.csv", b"", "is empty"),
        ("log.csv", b"did,x\n", "holds no rows"),
        ("log.csv", b"did,x\na,1,2\n", "line 2 has 3 fields, the first line 2"),
        ("log.xlsx", b"", "must be a file that ends in .parquet"),
    ],
)
def test_files_that_are_no_logs(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=sentence):
        read(LogsConfig(path=str(tmp_path / name), action=("did",)))
    assert len(check(LogsConfig(path=str(tmp_path / name), action=("did",))).findings) == 1
    with pytest.raises(FileError, match="does not exist"):
        read(LogsConfig(path=str(tmp_path / "other.csv"), action=("did",)))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.parquet"
    pl.DataFrame(TABLE).write_parquet(path)
    plain = Log.collect

    def growing(self: Log, frame: Any) -> Any:
        result = plain(self, frame)
        pl.DataFrame({**TABLE, "extra": TABLE["x"]}).write_parquet(path)
        return result

    monkeypatch.setattr(Log, "collect", growing)
    with pytest.raises(FileError, match=r"log\.parquet changed while it was read \([\d,]+ bytes before, [\d,]+ now\)"):
        read(LogsConfig(path=str(path), **ROLES))


def test_settings_that_contradict_each_other() -> None:
    for wrong, sentence in (
        ({"validation_share": 0.5, "test_share": 0.5}, "leave no training part"),
        ({"split": "column"}, "needs domain.split_column"),
        ({"split": "time"}, "needs domain.time"),
        ({"low": (0.0,)}, "must have equally many limits"),
        ({"horizon": 0}, "domain.horizon=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LogsConfig(**wrong)  # pyright: ignore[reportArgumentType]


def test_times_may_be_dates_or_text(tmp_path: Path) -> None:
    day = [f"2024-01-{1 + i % 4:02d}" for i in range(160)]
    date, stamp = pl.Series(day).str.to_date(), pl.Series(day).str.to_datetime()
    for values in (day, [f"{d} 12:00:00" for d in day], date, stamp, stamp.dt.replace_time_zone("Europe/Paris")):
        pl.DataFrame({**TABLE, "when": values}).reverse().write_parquet(tmp_path / "log.parquet")
        keys = read(LogsConfig(path=str(tmp_path / "log.parquet"), **ROLES)).keys
        assert keys.step == 86400
        assert (np.diff(keys.order_N.reshape(40, 4), axis=1) == -1).all()


def test_large_files_are_sampled_for_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(bytes(range(250)) * 8)
    whole = digest(str(path))
    monkeypatch.setattr("uat.adapters.logs.files.WHOLE", 100)
    monkeypatch.setattr("uat.adapters.logs.files.SAMPLE", 16)
    monkeypatch.setattr("uat.adapters.logs.files.SAMPLES", 8)
    found = set()
    for change in (0, 1999, 1000):
        content = bytearray(bytes(range(250)) * 8)
        content[change] ^= 1
        path.write_bytes(content)
        found.add(digest(str(path)))
    assert len(found | {whole}) == 4 or len(found) == 3
    assert digest(str(tmp_path / "none.csv")) is None


def test_findings_in_strict_mode_raise_errors_alone() -> None:
    strict = Findings()
    strict.warning("a", 1, "odd")
    assert strict.found == []
    with pytest.raises(FileError, match="wrong"):
        strict.error("a", 1, "wrong")


# ---------------------------------------------------------------- the command


def test_the_command_prints_findings_and_fails_only_if_the_log_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(TRAPS["gaps"](EXAMPLE), Path("events.parquet"))
    flags = [
        "--action",
        "offer",
        "--reward=clicked",
        "--episode",
        "customer",
        "--time",
        "day",
        "--propensity",
        "propensity",
    ]
    main(["data", "check", "logs:events.parquet", *flags, "--json"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gaps"]["severity"] == "warning"
    assert rows["episodes"]["sentence"] == "400"
    write(TRAPS["propensities"](EXAMPLE), Path("events.parquet"))
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", "logs:events.parquet", *flags])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert "propensities" in out
    assert "events.parquet: row 4, column propensity: the propensity is 0.0" in err
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", "logs:missing.parquet"])
    assert stop.value.code == 2
    assert "missing.parquet does not exist" in capsys.readouterr().err
