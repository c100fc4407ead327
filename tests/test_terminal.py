"""Output of commands: untrusted text cannot move the cursor, fake a line, or fail for lack of a character."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import uat
from tests.builders import call
from uat import terminal
from uat.cli import main
from uat.evaluation.tables import columns, print_rows
from uat.metrics import Score
from uat.paper.report.__main__ import main as report_main
from uat.paper.studies.__main__ import main as studies_main
from uat.training.progress import Board, BoardOfBars, Lines

Captured = pytest.CaptureFixture[str]
NASTY = "x\x1b[2J\r\n\u202eevil\u2066\x07\x9b\u2028\ud800\tend"
FORBIDDEN = set("\x1b\r\u202e\u2066\x07\x9b\u2028\ud800\t")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1])}
ASCII = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def program(*argv: str, module: str = "uat", **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", module, *argv]
    how = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run(command, timeout=120, check=False, **how)


def clean(text: str) -> str:
    assert not FORBIDDEN & set(text), ascii(text)
    return text


def test_plain_text_is_one_line_of_printable_letters() -> None:
    assert terminal.plain(NASTY).isprintable()
    assert terminal.plain("a\nb") == "a b"
    assert terminal.plain("ü ± −") == "ü ± −"
    assert "\\x1b[2J" in terminal.plain(NASTY)


def test_tables_show_escapes_and_keep_their_lines() -> None:
    text = columns([{"name": NASTY, NASTY: [NASTY], "n": 1}])
    assert len(clean(text).split("\n")) == 3


def test_json_is_valid_whatever_it_holds(capsys: Captured) -> None:
    print_rows([{"name": NASTY, "undefined": math.nan, "all": [math.inf, (1.5, None)]}], as_json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == [{"name": NASTY, "undefined": None, "all": [None, [1.5, None]]}]


@pytest.mark.parametrize("watched", [False, True])
def test_progress_shows_escapes(watched: bool, capsys: Captured, tmp_path: Path) -> None:
    if watched:
        pytest.importorskip("rich")
    (tmp_path / "0.json").write_text(json.dumps({"name": "job", "epoch": 1, "total": 2, "note": NASTY}))
    board = BoardOfBars(2) if watched else Board(2, every_seconds=0.0)
    with board:
        board.say(NASTY)
        board.done(NASTY, 1.0, failed=True)
        board.watch(tmp_path)
    line = Lines(NASTY, 1)
    line.update(1, NASTY)
    err = capsys.readouterr().err
    assert not (FORBIDDEN - {"\x1b", "\r"}) & set(err)
    assert "\x1b[2Jx" not in err
    assert err.count("x\\x1b[2J") >= (2 if watched else 4)


@pytest.mark.parametrize(
    ("run", "argv"), [(main, ["evaluate", NASTY]), (studies_main, [NASTY]), (report_main, [NASTY])]
)
def test_an_error_that_quotes_its_cause_is_one_clean_line(
    run: Callable[[list[str]], None], argv: list[str], capsys: Captured
) -> None:
    code, out, err = call(capsys, run, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    clean(err)


@pytest.mark.parametrize(
    "argv",
    [[NASTY], ["list", NASTY], ["list", f"--{NASTY}"], ["train", "darkroom", "--train.lr", NASTY], ["train", NASTY]],
)
def test_mistakes_on_the_command_line_are_quoted_as_escapes(argv: list[str], capsys: Captured) -> None:
    code, out, err = call(capsys, main, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    clean(err)


@pytest.mark.parametrize("argv", [["--nothing"], ["main", "--workers", NASTY], ["main", "--executor", NASTY], []])
def test_flags_without_the_console_libraries_are_one_sentence_too(argv: list[str], capsys: Captured) -> None:
    code, out, err = call(capsys, studies_main, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("uat.paper.studies: ")
    assert "see python -m uat.paper.studies --help" in clean(err)


def test_a_warning_is_one_clean_line(capsys: Captured) -> None:
    before = warnings.showwarning
    with terminal.command("uat"):
        warnings.simplefilter("always")
        warnings.warn(NASTY, UserWarning, stacklevel=1)
    err = capsys.readouterr().err
    assert clean(err).startswith("uat: warning: x")
    assert err.count("\n") == 1
    assert warnings.showwarning is before


def test_names_in_a_config_do_not_reach_the_terminal_raw(tmp_path: Path, capsys: Captured) -> None:
    run = uat.Run.create(uat.recipe("darkroom", "uat", "smoke"), tmp_path / "run")
    data = json.loads(run.file("config.json").read_text())
    for changed in ({"method_name": NASTY}, {NASTY: 1}, {"domain": {**data["domain"], "schedule": NASTY}}):
        run.write_json("config.json", {**data, **changed})
        code, out, err = call(capsys, main, "evaluate", str(run.path))
        assert (code, out, err.count("\n")) == (2, "", 1)
        clean(err)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\nmore"),
            "not enough memory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (UnicodeEncodeError("ascii", "x", 0, 1, "no"), "ascii"),
    ],
)
def test_what_a_machine_lacks_is_one_sentence(error: Exception, said: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stop, terminal.command("uat"):
        raise error
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes"), terminal.command("uat"):
        raise RuntimeError("shapes")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_are_spelt_out_where_an_encoding_lacks_them(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with terminal.command("uat"):
        terminal.show("0.5 ± 0.1 − Δ 好")
    shown = stream.buffer.getvalue().decode(encoding)  # pyright: ignore[reportAttributeAccessIssue]
    lacking = {"ascii": "0.5 +/- 0.1 - delta \\u597d\n", "latin-1": "0.5 +/- 0.1 - delta \\u597d\n"}
    assert shown == lacking.get(encoding, "0.5 ± 0.1 − Δ 好\n")


def test_without_streams_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw, or with both closed by the shell."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with terminal.command("uat"):
        terminal.show("x")
        terminal.say("x")


# ---------------------------------------------------------------- as a program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run in a folder whose name contains control characters."""
    out = tmp_path_factory.mktemp("runs") / "run \x1b[2J\n\u202e"
    changes = {"domain.horizon": 4, "domain.size": 4, "train.epochs": 1, "train.validation_episodes": 4}
    config = uat.override(uat.recipe("darkroom", "uat", "smoke"), {**changes, "evaluation.episodes": 4})
    return uat.train(config, out, device="cpu").path


def test_an_ascii_terminal_is_enough_for_scores(folder: Path) -> None:
    done = program("evaluate", str(folder), "--device", "cpu", env=ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"mean +/- deviation over seeds" in done.stdout
    clean(done.stdout.decode())


def test_a_folder_of_any_name_is_audited_on_an_ascii_terminal(folder: Path, capsys: Captured) -> None:
    code, out, err = call(capsys, main, "audit", str(folder), "--device", "cpu", "--episodes", "4")
    assert (code, err) == (0, "")
    assert "run \\x1b[2J" in clean(out)


@pytest.mark.parametrize(
    ("run", "argv"),
    [(main, []), (main, ["evaluate", "--help"]), (main, ["list", "domains"]), (studies_main, ["--help"])],
)
def test_help_and_lists_are_shown_on_an_ascii_terminal(
    run: Callable[[list[str]], None], argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with contextlib.suppress(SystemExit):
        run(argv)
    stream.flush()
    assert len(stream.buffer.getvalue()) > 200  # pyright: ignore[reportAttributeAccessIssue]


def test_a_reader_that_has_gone_ends_a_command_silently(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = program("list", "recipes", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (terminal.BROKEN_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full_is_one_sentence() -> None:
    alone = f"import runpy; t = runpy.run_path({terminal.__file__!r})\nwith t['command']('uat'): t['show']('x')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", alone], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"No space left on device" in done.stderr


def test_a_row_of_a_score_is_all_text_that_may_be_shown() -> None:
    row = Score(
        run="", method=NASTY, domain=NASTY, task=NASTY, setting=NASTY, split="", seed=0, metric="", value=1.0, n=1
    )
    assert clean(columns([{"row": str(row)}]))
