"""The command line: data on stdout, progress on stderr, and one sentence for every mistake."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import uat
import uat.cli
from uat.cli import VERBS, main
from uat.config import EvaluationConfig, TrainConfig, to_json
from uat.domains import DOMAINS
from uat.domains.darkroom import DarkRoom
from uat.evaluation.tables import LEGEND
from uat.methods import METHODS
from uat.metrics import Metric
from uat.recipes import pairs, recipe
from uat.registry import Problem
from uat.training.epoch import Epoch

Captured = pytest.CaptureFixture[str]
SMALL = ["--domain.horizon", "5", "--method.d-model", "8", "--method.d-ff", "8", "--method.num-layers", "1"]
TRAIN = ["train", "darkroom", "--preset", "smoke", "--device", "cpu", *SMALL]


def call(capsys: Captured, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    code: Any = 0
    try:
        main(list(argv))
    except SystemExit as stop:
        code = stop.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(capsys: Captured, *argv: str) -> str:
    """Check the answer to a mistake: exit code 2, nothing on stdout, one line on stderr."""
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("uat: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def plain(text: str) -> str:
    """Help without its frames and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def sentences(body: list[ast.stmt]) -> list[str]:
    """The texts under the fields of a class."""
    found = []
    for here, below in itertools.pairwise(body):
        if isinstance(here, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found.append(str(below.value.value))
    return found


def class_bodies(source: str) -> list[list[ast.stmt]]:
    return [node.body for node in ast.parse(textwrap.dedent(source)).body if isinstance(node, ast.ClassDef)]


def sentences_of(config: type[Any]) -> list[str]:
    owners = [owner for owner in config.__mro__ if dataclasses.is_dataclass(owner)]
    return [text for owner in owners for body in class_bodies(inspect.getsource(owner)) for text in sentences(body)]


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_usage_names_every_command(argv: list[str], capsys: Captured) -> None:
    code, out, err = call(capsys, *argv)
    assert (code, err) == (0, "")
    assert all(f"uat {verb}" in out for verb in VERBS)


def test_version_is_printed(capsys: Captured) -> None:
    assert call(capsys, "--version") == (0, f"{uat.__version__}\n", "")


def test_help_of_the_commands_holds_every_options_sentence(capsys: Captured) -> None:
    helps = ""
    for verb in VERBS:
        code, out, err = call(capsys, verb, "--help")
        assert (code, err) == (0, "")
        helps += plain(out)
    wanted = [text for body in class_bodies(inspect.getsource(uat.cli)) for text in sentences(body)]
    assert len(wanted) > 15
    assert [text for text in wanted if plain(text) not in helps] == []


@pytest.mark.parametrize(("domain", "method"), pairs())
def test_help_of_train_holds_every_setting_of_the_chosen_pair(domain: str, method: str, capsys: Captured) -> None:
    code, out, _ = call(capsys, "train", domain, "--method", method, "--help")
    assert code == 0
    for config in (DOMAINS[domain].config, METHODS[method].config, TrainConfig, EvaluationConfig):
        assert [text for text in sentences_of(config) if plain(text) not in plain(out)] == []


def test_settings_of_another_method_are_no_flags(capsys: Captured) -> None:
    flag, train = "--method.feedback-decay", ("train", "darkroom", "--method")
    assert flag in call(capsys, *train, "uat", "--help")[1]
    assert flag not in call(capsys, *train, "vanilla", "--help")[1]
    assert flag in refused(capsys, *train, "vanilla", flag, "0.5")


def test_a_boolean_setting_has_a_flag_for_each_value(capsys: Captured) -> None:
    """The sentence beside the two flags describes the first one, so it reads the same as in Python."""
    train = ("train", "darkroom", "--method", "uat")
    out = plain(call(capsys, *train, "--help")[1])
    assert "--method.use-action, --method.no-use-action Give the previous action to the utility encoder" in out
    assert "--no-json" not in out
    for flag, value in {"use-action": True, "no-use-action": False, "no-sees-action": False}.items():
        resolved = json.loads(call(capsys, *train, "--dry-run", f"--method.{flag}")[1])
        assert resolved["method"]["use_action"] is value


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("frobnicate", "unknown command 'frobnicate'; known: list, train, evaluate, audit, watch, demo"),
        ("trian darkroom", "unknown command 'trian'; did you mean 'train'?"),
        ("--verison", "--verison"),
        ("train", "name a domain"),
        ("data check", "uat data needs NAME and PATH; see uat data --help"),
        ("reproduce", "uat reproduce needs STUDY; see uat reproduce --help"),
        ("train darkrom", "unknown domain 'darkrom'; did you mean 'darkroom'?"),
        ("train darkroom --method uta", "unknown method 'uta'; did you mean 'uat'?"),
        ("train darkroom --method=vanila", "unknown method 'vanila'; did you mean 'vanilla'?"),
        ("train darkroom --preset qick", "unknown preset 'qick'; did you mean 'quick'?"),
        ("train darkroom --train.lrr 3", "did you mean --train.lr?"),
        ("train darkroom --method.d-modle 8", "did you mean --method.d-model?"),
        ("train darkroom --jsno", "did you mean --json?"),
        ("train darkroom extra", "extra"),
        ("train darkroom --dry-run --train.lr", "--train.lr"),
        ("train darkroom --train.lr abc", "'abc'"),
        ("train darkroom --train.epochs 1.5", "1.5"),
        ("train darkroom --seed x", "--seed"),
        ("train darkroom --train.lr-schedule cosin", "'cosine'"),
        ("train darkroom --domain.schedule weekly", "'gradual'"),
        ("train darkroom --train.lr nan", "train.lr=nan must be positive"),
        ("train darkroom --train.lr -1", "train.lr=-1.0 must be positive"),
        ("train darkroom --train.lr=-1", "train.lr=-1.0 must be positive"),
        ("train darkroom --train.lr inf", "train.lr=inf must be"),
        ("train darkroom --train.epochs -3", "train.epochs=-3 must be at least 1"),
        ("train darkroom --train.warmup -1", "train.warmup=-1 must not be negative"),
        ("train darkroom --method.dropout nan", "dropout=nan"),
        ("train darkroom --method.feedback-decay -0.5", "feedback_decay=-0.5"),
        ("train darkroom --method.num-heads 3", "num_heads=3 must divide d_model=64"),
        ("train darkroom --domain.horizon -5", "horizon=-5"),
        ("train darkroom --domain.shift-steps 20 10", "shift_steps=(20, 10)"),
        ("train darkroom --evaluation.episodes 0", "evaluation.episodes=0 must be at least 1"),
        ("train darkroom --preset smoke --device gpu", "'gpu'"),
        ("list methds", "'methods'"),
        ("list --jsn", "Unrecognized options: --jsn; did you mean --json?"),
        ("evaluate", "name at least one run folder"),
        ("evaluate nowhere", "nowhere is not a run folder"),
        ("evaluate nowhere --episods 3", "did you mean --episodes?"),
        ("demo --preset smok", "'smoke'"),
        ("demo --prest smoke", "did you mean --preset?"),
    ],
)
def test_a_mistake_gets_one_sentence_that_helps(
    command: str, said: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ["--dry-run"] if command.startswith("train") and "--device" not in command else []  # should it be let pass
    answer = refused(capsys, *command.split(), *dry)
    assert said in answer
    assert "---" not in answer  # no frame around it
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "run"
    assert "use device 'cpu'" in refused(capsys, "train", "darkroom", "--device", "cuda", "--out", str(out))
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_refused(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in refused(capsys, *TRAIN, "--out", str(tmp_path / "file"))
    assert "file" in refused(capsys, *TRAIN, "--out", str(tmp_path / "file" / "run"))


def test_training_that_diverges_says_so_in_one_sentence(capsys: Captured, tmp_path: Path) -> None:
    assert "not finite" in refused(capsys, *TRAIN, "--train.lr", "1e12", "--out", str(tmp_path / "run"))


def test_a_stopped_run_exits_with_130_and_says_how_to_go_on(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uat, "train", stop)
    code, out, err = call(capsys, *TRAIN)
    assert (code, out) == (130, "")
    assert "--resume" in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- list


def test_list_methods_gives_one_row_per_method(capsys: Captured) -> None:
    code, out, err = call(capsys, "list", "methods", "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["method"] for row in rows] == list(METHODS)
    sees = {row["method"]: row["sees"] for row in rows}
    assert (sees["vanilla"], sees["uat"], sees["uat-no-action"]) == ([], ["action", "reward"], ["reward"])
    sizes = {row["method"]: row["parameters:darkroom"] for row in rows if "darkroom" in row["domains"]}
    assert 50_000 < sizes["vanilla"] < sizes["uat"] < 300_000
    for row in rows:
        assert row["domains"] == [name for name in DOMAINS if METHODS[row["method"]].serves(name)]
        assert [f"parameters:{name}" for name in row["domains"]] == [
            key for key in row if key.startswith("parameters:")
        ]


def test_a_method_is_listed_and_trained_in_its_domains_alone(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DOMAINS, "lightroom", dataclasses.replace(DOMAINS["darkroom"], recipes=None))
    monkeypatch.setitem(METHODS, "uat-no-q", dataclasses.replace(METHODS["uat-no-q"], domains=("lightroom",)))
    rows = {row["method"]: row for row in json.loads(call(capsys, "list", "methods", "--json")[1])}
    assert rows["uat"]["domains"] == list(DOMAINS)
    assert rows["uat-no-q"]["domains"] == ["lightroom"]
    assert "parameters:lightroom" in rows["uat-no-q"]
    assert "parameters:darkroom" not in rows["uat-no-q"]
    recipes = json.loads(call(capsys, "list", "recipes", "--json")[1])
    assert {row["domain"] for row in recipes if row["method"] == "uat-no-q"} == {"lightroom"}
    said = refused(capsys, "train", "darkroom", "--method", "uat-no-q", "--dry-run")
    assert "the method 'uat-no-q' does not serve 'darkroom'; it serves lightroom" in said


def test_list_domains_and_recipes_give_rows(capsys: Captured) -> None:
    domains = json.loads(call(capsys, "list", "domains", "--json")[1])
    assert [row["domain"] for row in domains] == list(DOMAINS)
    recipes = json.loads(call(capsys, "list", "recipes", "--json")[1])
    assert len(recipes) == len(pairs()) * 3
    assert {"domain": "darkroom", "method": "uat", "preset": "quick"} in recipes


def test_list_without_json_is_a_table(capsys: Captured) -> None:
    lines = call(capsys, "list")[1].splitlines()
    assert lines[0].startswith("method")
    assert set(lines[1]) == {"-", " "}
    assert [line.split()[0] for line in lines[2:]] == list(METHODS)


def test_list_names_a_package_that_cannot_be_used(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "the method 'x' of theirs 1.0 cannot be used: importing theirs:X failed with ImportError: no"
    monkeypatch.setattr(METHODS, "problems", lambda: [Problem("x", "theirs 1.0", sentence)])
    code, out, err = call(capsys, "list", "domains", "--json")
    assert code == 0
    assert {row["from"] for row in json.loads(out)} == {"uat"}
    assert err == f"uat: warning: {sentence}\n"


def test_code_in_a_run_folder_is_imported_only_if_the_command_says_so(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    config = to_json(recipe("darkroom", "uat", "smoke"))
    for key, section in (("domain_name", "domain"), ("method_name", "method")):
        (tmp_path / key).mkdir()
        (tmp_path / key / "config.json").write_text(json.dumps({**config, key: "python:evil:Thing", section: {}}))
        for verb in ("evaluate", "audit", "watch"):
            said = refused(capsys, verb, key)
            assert "python:evil:Thing is code, which is imported only if you say so: --trust" in said
            assert not trace.exists()
        said = refused(capsys, "evaluate", key, "--trust")
        assert "python:evil:Thing: the module evil has no 'Thing'" in said
        assert trace.exists()
        trace.unlink()
        del sys.modules["evil"]
    said = refused(capsys, "train", "python:evil:Thing", "--preset", "smoke")
    assert "the module evil has no 'Thing'" in said
    del sys.modules["evil"]


# ---------------------------------------------------------------- train


def resolved(capsys: Captured, *argv: str) -> dict[str, Any]:
    code, out, err = call(capsys, *argv, "--dry-run")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_dry_run_prints_the_config_and_makes_nothing(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved(capsys, "train", "darkroom") == to_json(recipe("darkroom", "uat", "paper"))
    found = resolved(capsys, "train", "darkroom", "--method", "vanilla", "--preset=smoke", "--seed", "7")
    assert found == to_json(recipe("darkroom", "vanilla", "smoke", seed=7))
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_flag_reaches_the_config(capsys: Captured) -> None:
    flags = "--train.lr 0.5 --domain.shift-steps 10 20 --method.max-positions 80 --train.random-start"
    flags += " --domain.schedule cyclic --evaluation.episodes 9 --seed 3"
    found = resolved(capsys, "train", "darkroom", *flags.split())
    assert (found["seed"], found["evaluation"]["episodes"], found["method"]["max_positions"]) == (3, 9, 80)
    assert (found["train"]["lr"], found["train"]["random_start"]) == (0.5, True)
    assert (found["domain"]["schedule"], found["domain"]["shift_steps"]) == ("cyclic", [10, 20])


def test_options_may_stand_before_the_domain_as_the_usage_line_shows(capsys: Captured) -> None:
    after = resolved(capsys, "train", "darkroom", "--preset", "smoke", "--seed", "1")
    assert resolved(capsys, "train", "--preset", "smoke", "--seed", "1", "darkroom") == after


def test_a_method_named_twice_is_the_last_one_or_a_mistake(capsys: Captured) -> None:
    code, out, _ = call(capsys, "train", "darkroom", "--method", "uat", "--method", "vanilla", "--dry-run")
    assert code == 2 or json.loads(out)["method_name"] == "vanilla"


def test_train_and_evaluate_print_rows_and_tell_progress_apart(capsys: Captured, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    code, out, err = call(capsys, *TRAIN, "--out", folder, "--json")
    assert code == 0
    [summary] = json.loads(out)
    assert (summary["run"], summary["best_epoch"] in (2, 4)) == (folder, True)
    assert 0 <= summary["validation/accuracy"] <= 1
    assert re.search(r"epoch 4/4.*validation accuracy", err)

    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert "already holds this run; continue it with --resume" in refused(capsys, *TRAIN, "--out", folder)
    assert "holds another run" in refused(capsys, *TRAIN, "--out", folder, "--seed", "1", "--resume")
    code, again, _ = call(capsys, *TRAIN, "--out", folder, "--resume", "--json")
    assert (code, json.loads(again)) == (0, [summary])
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before

    code, out, err = call(capsys, "evaluate", folder, "--episodes", "8", "--device", "cpu", "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert {row["method"] for row in rows} == {"uat", "ceiling", "expert", "random"}
    own = [row for row in rows if row["method"] == "uat"]
    assert {(row["n"], *row["runs"]) for row in own} == {(8, summary["identity"])}
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)
    assert (own[0]["seeds"], own[0]["std"], own[0]["finished"]) == ([0], None, True)

    code, out, err = call(capsys, "evaluate", folder, "--no-references", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[:4] == ["task", "setting", "preset", "method"]
    setting = "horizon=5,d_model=8,num_layers=1,d_ff=8"
    assert out.splitlines()[2].split()[:4] == ["darkroom/gradual", setting, "smoke", "uat"]
    assert out.splitlines()[3:] == ["", LEGEND]

    for episodes in ("0", "-5"):
        assert f"episodes={episodes}" in refused(capsys, "evaluate", folder, "--episodes", episodes)


def test_seeds_are_one_line_and_each_shows_them_apart(capsys: Captured, tmp_path: Path) -> None:
    folders = []
    for method in ("vanilla", "uat"):
        for seed in ("0", "1"):
            folders.append(str(tmp_path / f"{method}-{seed}"))
            flags = ["--method", method, "--seed", seed, "--train.epochs", "1", "--out", folders[-1]]
            assert call(capsys, *TRAIN, *flags)[0] == 0
    flags = [*folders, "--episodes", "8", "--device", "cpu"]
    rows = json.loads(call(capsys, "evaluate", *flags, "--json")[1])
    by = {row["method"]: row for row in rows if row["metric"] == "accuracy"}
    assert by.keys() == {"vanilla", "uat", "ceiling", "expert", "random"}
    single = json.loads(call(capsys, "evaluate", *flags, "--json", "--each")[1])
    values = [
        row["value"] for row in single if (row["method"], row["metric"], len(row["seeds"])) == ("uat", "accuracy", 1)
    ]
    assert by["uat"]["value"] == pytest.approx(sum(values) / 2)
    assert by["uat"]["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    gap = (by["uat"]["value"] - by["vanilla"]["value"]) / (by["ceiling"]["value"] - by["vanilla"]["value"])
    assert by["uat"]["gap_closed"] == pytest.approx(gap)
    for each, lines, differences in (([], 5, 1), (["--each"], 9, 3)):
        table = call(capsys, "evaluate", *flags, *each)[1].splitlines()
        assert len(table) == 2 + lines + 2 + 5 + differences
    assert "named twice" in refused(capsys, "evaluate", folders[0], folders[0], "--no-references", "--device", "cpu")


def test_an_unfinished_run_is_refused_or_told(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = str(tmp_path / "run"), Epoch.run

    def dying(self: Epoch, total: int, epoch: int) -> Any:
        if total == 2:
            raise KeyboardInterrupt
        return done(self, total, epoch)

    monkeypatch.setattr(Epoch, "run", dying)
    assert call(capsys, *TRAIN, "--out", folder)[0] == 130
    said = refused(capsys, "evaluate", folder, "--device", "cpu")
    assert "run is unfinished: 2 epochs are done, of at most 4" in said
    flags = ["--unfinished", "--no-references", "--json", "--device", "cpu"]
    code, out, err = call(capsys, "evaluate", folder, *flags)
    assert code == 0
    assert "run is unfinished: 2 epochs are done" in err
    assert {row["finished"] for row in json.loads(out)} == {False}


def test_a_run_without_a_policy_cannot_be_scored(capsys: Captured, tmp_path: Path) -> None:
    uat.Run.create(recipe("darkroom", "uat", "smoke"), tmp_path)
    assert "policy.safetensors does not exist" in refused(capsys, "evaluate", str(tmp_path), "--device", "cpu")


def test_the_run_folder_is_named_after_the_run(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, *TRAIN, "--method", "vanilla", "--seed", "2", "--train.epochs", "1")
    assert code == 0
    assert (tmp_path / "runs/darkroom-vanilla-smoke-2/policy.safetensors").exists()
    assert "darkroom-vanilla-smoke-2" in out


@pytest.mark.parametrize("higher", [True, False])
def test_the_summary_is_that_of_the_epoch_that_was_kept(
    higher: bool, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best epoch is found if good numbers are below -1, and if lower is better."""
    monkeypatch.setattr(DarkRoom, "metrics", (Metric(name="return", higher_is_better=higher),))
    values = iter([-9.0, -3.0, -7.0])
    monkeypatch.setattr("uat.training.trainer.Trainer.validate", lambda _: {"return": next(values)})
    flags = ["--train.epochs", "6", "--out", str(tmp_path / "run"), "--json"]
    [summary] = json.loads(call(capsys, *TRAIN, *flags)[1])
    assert (summary["best_epoch"], summary["validation/return"]) == ((4, -3.0) if higher else (2, -9.0))


def test_on_a_terminal_the_bar_goes_to_stderr(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = call(capsys, *TRAIN, "--out", str(tmp_path / "run"), "--json")
    assert code == 0
    assert len(json.loads(out)) == 1
    assert "uat on darkroom" in err


def test_the_count_stays_in_sight_on_eighty_columns(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "4/4" in call(capsys, *TRAIN, "--out", str(tmp_path / "run"))[2]


# ---------------------------------------------------------------- as a program


def test_python_m_uat_is_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uat", "list", "domains", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["domain"] == "darkroom"
