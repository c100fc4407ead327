"""The command line: verbs without logic. Data goes to stdout, progress to stderr; bad input exits with code 2."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import uat
from uat import terminal
from uat.config import PRESETS, SECTIONS, RunConfig, lookup, to_json
from uat.data import SOURCES, archives
from uat.domains import DOMAINS
from uat.evaluation.auditing import audit_run
from uat.evaluation.comparison import compare
from uat.evaluation.curve_figure import check_figure, draw_curves
from uat.evaluation.curves import compare_curves, curve_rows
from uat.evaluation.scores import what_is_unfinished
from uat.evaluation.tables import LEGEND, difference_rows, method_rows, print_rows, score_rows
from uat.executors import ExecutorName
from uat.methods import METHODS
from uat.objectives import OBJECTIVES
from uat.paper.report.command import ReportOptions
from uat.paper.report.command import command as report_command
from uat.paper.report.writing import write_report
from uat.paper.studies.command import command as reproduce_command
from uat.paper.studies.grids import STUDIES
from uat.paper.studies.options import Reproduce
from uat.recipes import compose, default_folder, pairs
from uat.registry import Registry, is_address
from uat.runs import Run
from uat.settings import current_names
from uat.terminal import say, show, show_json, show_page
from uat.threads import cpu_threads
from uat.training.progress import show_board, show_progress
from uat.training.ranks import launched
from uat.training.validation import best_epoch
from uat.tuning.start import default_path

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag that is only ever turned on: `--json` without `--no-json`. Settings of a run have both flags."""
Device = Annotated[str | None, tyro.conf.arg(metavar="{cpu,cuda}")]


@dataclass(frozen=True, kw_only=True)
class List:
    """List methods, domains, recipes or studies."""

    what: tyro.conf.Positional[Literal["methods", "domains", "recipes", "studies"]] = "methods"
    """Kind of things to list."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score trained policies on the test episodes, beside the Bayes filter, the expert and chance.

    Runs that differ by seed alone share one line."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    episodes: int | None = None
    """Number of test episodes; unset: as in the run's config."""
    references: bool = True
    """Score the Bayes filter, the expert and chance as well (computed once per run folder)."""
    each: bool = False
    """Show each run on its own line as well, not only the mean over seeds."""
    unfinished: bool = False
    """Accept runs whose training has not finished, and score their best weights so far."""
    curves: Path | None = None
    """File for a figure of what policies earn at each step of an episode (SVG, PNG or PDF), with a table."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    threads: int | None = None
    """CPU threads; unset: UAT_THREADS, or one."""
    trust: bool = False
    """Allow importing code that a run folder names, such as python:bandit:Bandit."""
    json: bool = False
    """Print JSON rows, one per line and metric, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Test whether policies are feedback-blind, and measure how much their decisions depend on each channel."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    episodes: int = 64
    """Number of test episodes to play."""
    draws: int = 2
    """Number of times that each channel is resampled."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    threads: int | None = None
    """CPU threads; unset: UAT_THREADS, or one."""
    trust: bool = False
    """Allow importing code that a run folder names, such as python:bandit:Bandit."""
    json: bool = False
    """Print JSON rows, one per run and channel, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Play test episodes with a trained policy, and write them to a film with a caption under each frame."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder."""
    episodes: int = 1
    """Number of episodes to play."""
    seed: int | None = None
    """Seed of other worlds; unset: the first test episodes."""
    out: Path | None = None
    """File that ends in .gif or .mp4 (which needs imageio-ffmpeg); unset: watch.gif in the run folder."""
    fps: int = 20
    """Frames per second, one frame for each step."""
    max_steps: int | None = None
    """Steps after which an episode is cut off; unset: its end."""
    trust: bool = False
    """Allow importing code that a run folder names, such as python:bandit:Bandit."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train Vanilla and UAT on DarkRoom in a few minutes, and write a page that compares what they have learnt."""

    out: Path = Path("runs/demo")
    """Folder for the two runs and the page."""
    preset: Literal["smoke", "quick", "paper"] = "quick"
    """Length of the training: smoke (seconds), quick (minutes on two cores) or paper."""
    seed: int = 0
    """Seed of both runs."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    threads: int | None = None
    """CPU threads; unset: UAT_THREADS, or one."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Check, download or prepare data."""

    verb: tyro.conf.Positional[Literal["check", "fetch", "prepare"]]
    """check: describe a file and report problems in it; exit with 2 if it cannot be used. fetch: download a published
    data set; repeat the command to resume an interrupted download. prepare: read the files once and write all that
    training needs to one file, for machines that cannot read them."""
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Kind of data, such as markets; for fetch, name of the data set, such as movielens-1m."""
    path: tyro.conf.Positional[Path]
    """File or folder to read; for fetch, the folder in which the data set gets a folder of its own."""
    out: Path | None = None
    """Output file of prepare, such as ml-1m.npz."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ReproduceAndReport(Reproduce):
    """Run a study of the paper: train and score its cells, write rows and a report.

    The folder of results is the only state: the same command again skips finished cells and resumes the others."""

    study: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="STUDY")]
    """main, ablation, boundary, mechanism, sensitivity, efficiency, diagnostics, or all."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    report: bool = True
    """Write the report, if matplotlib is installed."""


@dataclass(frozen=True, kw_only=True)
class Report(ReportOptions):
    """Make tables, figures and a page from the rows in a folder of results, and list missing measurements."""

    results: tyro.conf.Positional[Path]
    """Folder of results, such as one that `uat reproduce` wrote."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `uat`."""
    args = list(sys.argv[1:] if argv is None else argv)
    with terminal.command("uat", go_on="continue a training with --resume, a study by the same command"):
        if not args or args[0] in ("-h", "--help"):
            show_page(USAGE)
        elif args[0] == "--version":
            show(uat.__version__)
        else:
            verb = VERBS[lookup("command", args[0], VERBS)]
            with contextlib.nullcontext() if verb is run_bench else cpu_threads():
                verb(args[1:])


# ---------------------------------------------------------------- verbs


def run_list(args: list[str]) -> None:
    options = parse(List, args, "uat list")
    if options.what == "methods":
        rows = method_rows()
    elif options.what == "domains":
        rows = [
            {"domain": name, "tasks": list(d.tasks), "what": d.summary, "from": DOMAINS.owner(name)}
            for name, d in DOMAINS.items()
        ]
    elif options.what == "studies":
        rows = [{"study": name, "what": study.summary} for name, study in STUDIES.items()]
    else:
        rows = [{"domain": d, "method": m, "preset": p} for d, m in pairs() for p in PRESETS]
    print_rows(rows, as_json=options.json)
    if options.what == "domains" and not options.json:
        show("\ngym:ID is any Gymnasium environment, such as gym:CartPole-v1; gym:PACKAGE:ID imports the package first")
    for problem in [*METHODS.problems(), *DOMAINS.problems()]:
        say(f"uat: warning: {problem.sentence}")


def run_train(args: list[str]) -> None:
    """Parse the arguments twice: first the names, which decide the available settings, then everything."""
    options, config = parse_run(TrainOptions, args, "uat train")
    if options.dry_run:
        show_json(to_json(config))
        return
    run = uat.train(
        config,
        options.out or default_folder(config),
        resume=options.resume,
        source=options.source,
        device=options.device,
        threads=options.threads,
        progress=show_progress,
    )
    if launched().rank:
        return  # only the first of several processes prints
    best = best_epoch(run)
    summary = {"run": str(run.path), "identity": config.identity(), "best_epoch": best["epoch"]}
    scores = {name: value for name, value in best.items() if name.startswith("validation/")}
    summary |= {name: value for name, value in scores.items() if options.json or not math.isnan(value)}
    print_rows([summary], as_json=options.json)


def parse_run(kind: type[Any], args: list[str], prog: str) -> tuple[Any, RunConfig]:
    """Return the options of a command that trains, and the config from its names and its flags of settings."""
    names = peek(args, prog)
    default = compose(names["domain"], names["method"], names["preset"], objective=names["objective"])
    sections = [(name, type(getattr(default, name)), field(default=getattr(default, name))) for name in SECTIONS]
    whole = make_dataclass(
        kind.__name__, sections, bases=(kind,), namespace={"__doc__": kind.__doc__}, kw_only=True, frozen=True
    )
    options = parse(whole, with_current_flags(args, default), prog, both_flags=True)
    return options, dataclasses.replace(
        default, seed=options.seed, **{name: getattr(options, name) for name in SECTIONS}
    )


def run_tune(args: list[str]) -> None:
    options, config = parse_run(TuneOptions, args, "uat tune")
    if launched().count > 1:
        raise ValueError(
            "torchrun is for one large training (uat train); uat tune starts its own workers: start it once"
        )
    sweep = uat.tune(
        config,
        options.out or default_path(config),
        space=options.space or None,
        progress=show_board,
        **{name: getattr(options, name) for name in TUNING},
    )
    if options.json:
        print_rows(sweep.rows(), as_json=True)
    else:
        show_page(str(sweep))
    _ = sweep.best  # a sweep without one fails


TUNING = ("trials", "prune", "workers", "executor", "address", "device", "threads")


def with_current_flags(args: list[str], config: RunConfig) -> list[str]:
    """Return the arguments with short flags, and old flags of renamed settings, replaced by the current ones."""
    flags = {f"--{name}": f"--domain.{name}" for name in DOMAINS[config.domain_name].short_flags}
    for section in SECTIONS:
        for old, new in current_names(type(getattr(config, section))).items():
            for no in ("", "no-"):
                flags[f"--{section}.{no}{old}".replace("_", "-")] = f"--{section}.{no}{new}".replace("_", "-")
    parts = [arg.partition("=") for arg in args]
    return [flags.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in parts]


def open_runs(paths: Sequence[Path], *, trust: bool) -> list[Run]:
    """Open the runs in these folders; with `trust`, import code that they name, also from the current folder."""
    if trust:
        look_in_current_folder()
    return [Run.open(path, trust=trust) for path in paths]


def look_in_current_folder() -> None:
    """Add the current folder to the end of the import path, for code that the user named."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def run_evaluate(args: list[str]) -> None:
    options = parse(Evaluate, args, "uat evaluate")
    if not options.runs:
        raise ValueError("name at least one run folder: uat evaluate RUN...")
    runs = open_runs(options.runs, trust=options.trust)
    how = {name: getattr(options, name) for name in ("episodes", "references", "unfinished", "device", "threads")}
    for run in runs if options.unfinished else []:
        if warning := what_is_unfinished(run):
            say(f"uat: warning: {warning}")
    figure = None if options.curves is None else check_figure(options.curves)
    evaluations = [uat.evaluate(run, curves=figure is not None, **how) for run in runs]
    summaries = compare(evaluations, each=options.each)
    parts = [] if figure is None else compare_curves(evaluations, each=options.each)
    if figure is not None:
        draw_curves(parts, figure)
    if options.json:
        print_rows([*map(to_json, summaries), *(part.row() for part in parts)], as_json=True)
    else:
        print_rows(score_rows(summaries), as_json=False)
        show_page(f"\n{LEGEND}")
        if differences := difference_rows(summaries):
            show_page("\nDifferences on the same episodes and seeds [95 % interval], p: chance of one so large\n")
            print_rows(differences, as_json=False)
        if figure is not None:
            show_page("\nInside an episode: the mean over the first and the last tenth of its steps\n")
            print_rows(curve_rows(parts), as_json=False)
            say(f"figure: {figure}")


def run_audit(args: list[str]) -> None:
    options = parse(Audit, args, "uat audit")
    if not options.runs:
        raise ValueError("name at least one run folder: uat audit RUN...")
    runs = open_runs(options.runs, trust=options.trust)
    how = {name: getattr(options, name) for name in ("episodes", "draws", "device", "threads")}
    audits = [(run, audit_run(run, **how)) for run in runs]
    rows = [
        {"run": str(run.path), "method": run.config.method_name, "domain": run.config.domain_name, **row}
        for run, audit in audits
        for row in (audit.rows() if options.json else to_json(audit.channels))
    ]
    print_rows(rows, as_json=options.json)
    for run, audit in [] if options.json else audits:
        show()
        show(f"{run.path}: {audit.sentence()}")


def run_watch(args: list[str]) -> None:
    from uat.evaluation.watching import watch

    options = parse(Watch, args, "uat watch")
    [run] = open_runs([options.run], trust=options.trust)
    how = {name: getattr(options, name) for name in ("episodes", "seed", "fps", "max_steps", "trust")}
    if warning := what_is_unfinished(run):
        say(f"uat: warning: {warning}; these are its best weights so far")
    watched = watch(run, options.out, **how)
    print_rows(watched.rows, as_json=options.json)
    say(f"film: {watched.file}")


def run_demo(args: list[str]) -> None:
    from uat.paper.demo import demo

    options = parse(Demo, args, "uat demo")
    rows, page = demo(
        options.out,
        preset=options.preset,
        seed=options.seed,
        device=options.device,
        threads=options.threads,
        progress=show_progress,
    )
    print_rows(rows, as_json=options.json)
    say(f"page: {page}")


def run_data(args: list[str]) -> None:
    if len(args) > 1 and args[0] == "check" and ":" in args[1] and args[1] in DOMAINS:
        run_check(args[1:])
        return
    options = parse(Data, args, "uat data")
    if options.verb == "fetch":
        fetch = archives()[lookup("data set", options.name, archives())].fetch
        assert fetch is not None
        print_rows([{"data set": options.name, "folder": str(fetch(options.name, options.path))}], as_json=options.json)
        return
    if options.verb == "prepare":
        prepare = SOURCES[lookup("data", options.name, SOURCES)].prepare
        if prepare is None:
            raise ValueError(f"{options.name} needs no preparation: its files are read as they are")
        if options.out is None:
            raise ValueError(f"say where to write: uat data prepare {options.name} {options.path} --out FILE")
        print_rows([{"file": str(options.out), **prepare(options.path, options.out)}], as_json=options.json)
        return
    reports = SOURCES[lookup("data", options.name, SOURCES)].check(options.path)
    print_rows([row for report in reports for row in report.rows()], as_json=options.json)
    if reason := next((report.unsupported_reason for report in reports if report.unsupported_reason), None):
        raise ValueError(reason)


def run_check(args: list[str]) -> None:
    """Check the data of a domain such as logs:FILE, with the flags of `uat train`."""
    default = compose(args[0])
    check = DOMAINS[default.domain_name].check
    if check is None:
        raise ValueError(f"{args[0]} has no data to check")
    named = (Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DOMAIN")], field(default=args[0]))
    sections = [
        ("domain_name", *named),
        ("domain", type(default.domain), field(default=default.domain)),
        ("json", Switch, False),
    ]
    kind = make_dataclass(
        "Check",
        sections,
        namespace={"__doc__": "Check a log of decisions, with the flags of uat train."},
        kw_only=True,
        frozen=True,
    )
    options = parse(kind, with_current_flags(args, default), "uat data check", both_flags=True)
    checked = check(options.domain)
    print_rows(checked.rows(), as_json=options.json)
    if reason := checked.unsupported_reason:
        raise ValueError(reason)


def run_reproduce(args: list[str]) -> None:
    options = parse(ReproduceAndReport, args, "uat reproduce")
    if failures := reproduce_command(options, drawn_report):
        sys.exit(failures)


def drawn_report(options: Any) -> str | None:
    """Write the report and return the path of its page; None if there is no report."""
    if not options.report:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        say("no report: drawing needs matplotlib (pip install 'uat-transformer[report]')")
        return None
    return str(write_report(options.folder, preset=options.preset).page)


def run_report(args: list[str]) -> None:
    report_command(parse(Report, args, "uat report"))


def run_bench(args: list[str]) -> None:
    from uat.bench.options import Bench
    from uat.bench.report import report

    report(parse(Bench, args, "uat bench"))


VERBS: dict[str, Callable[[list[str]], None]] = {
    "list": run_list,
    "train": run_train,
    "evaluate": run_evaluate,
    "audit": run_audit,
    "watch": run_watch,
    "demo": run_demo,
    "tune": run_tune,
    "data": run_data,
    "reproduce": run_reproduce,
    "report": run_report,
    "bench": run_bench,
}

USAGE = """usage: uat COMMAND [OPTIONS]

  uat list [methods|domains|recipes|studies]       list methods, domains, recipes or studies
  uat train DOMAIN --method NAME [--preset P] ...  train a policy into a run folder
  uat train gym:ID [--method NAME] ...             the same in a Gymnasium environment, by PPO
  uat tune DOMAIN --space train.lr=LOW..HIGH:log ...  compare settings on validation episodes
  uat evaluate RUN... [--each] [--curves FILE] ... score and compare policies beside the Bayes filter
  uat audit RUN... [--json]                        test whether policies are feedback-blind
  uat watch RUN [--out FILE.gif|FILE.mp4] ...      play test episodes and write them to a film
  uat demo [--out DIR]                             train Vanilla and UAT on DarkRoom, write a page
  uat data check NAME PATH [--json]                describe a file of yours, and whether it can be used
  uat data check logs:FILE --action COLUMN ...     describe a log of decisions, and what is odd in it
  uat data fetch NAME FOLDER                       download a published data set, such as movielens-1m
  uat data prepare NAME PATH --out FILE            convert files to one that every machine can read
  uat reproduce STUDY [--preset P] [--dry-run] ... run or resume a study of the paper, or all
  uat report DIR [--out DIR]                       make tables, figures and a page from a study's rows
  uat bench [--cases ...] [--json] [--plot FILE]   time each fast path, its slow twin and its peers

`uat COMMAND --help` explains every option."""


# ---------------------------------------------------------------- arguments


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a policy. Every setting of the chosen domain and method is a flag whose default comes from the preset."""

    domain_name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DOMAIN")]
    """Domain, such as darkroom; a Gymnasium environment as gym:ID or gym:PACKAGE:ID; your log as logs:FILE; or your own
    code as python:MODULE:CLASS."""
    method_name: Annotated[str, tyro.conf.arg(name="method", metavar="NAME")] = "uat"
    """Method, such as uat or vanilla; or your own code as python:MODULE:CLASS."""
    objective_name: Annotated[str | None, tyro.conf.arg(name="objective", metavar="NAME")] = None
    """Objective of the training: imitation of an expert; ppo, which plays and learns from rewards alone; or advantage,
    filtered or clone, which learn from a log; unset: the usual one of the domain."""
    preset: str = "paper"
    """smoke (seconds), quick (minutes on two cores) or paper (the published settings)."""
    seed: int = 0
    """Seed of initial weights, training worlds, sampled actions and dropout."""
    out: Path | None = None
    """Run folder; unset: runs/DOMAIN-METHOD-PRESET-SEED."""
    resume: Switch = False
    """Resume the run in that folder."""
    source: Path | None = None
    """Run folder whose trained weights are reused, if the training is the same: Vanilla's for tent and cotta."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    threads: int | None = None
    """CPU threads; unset: UAT_THREADS, or one."""
    dry_run: Switch = False
    """Print the settings and stop."""
    json: Switch = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Train with several settings, and rank them on validation episodes.

    The same command again resumes the sweep in its folder. Settings that do not vary are flags, as in `uat train`."""

    domain_name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DOMAIN")]
    """Domain, such as darkroom; or your own code as python:MODULE:CLASS."""
    space: tuple[str, ...] = ()
    """Settings that vary, as NAME=VALUES: train.lr=1e-4..3e-3:log, method.num_layers=1..4, method.d_model=32,64,128 or
    method.context=none,64. Unset: learning rates, width, context, and the entropy bonus of ppo."""
    trials: int = 20
    """Number of trials in the folder; a larger number adds some."""
    prune: Switch = False
    """Stop a trial when its best validation so far is worse than the median of earlier trials at the same epoch."""
    method_name: Annotated[str, tyro.conf.arg(name="method", metavar="NAME")] = "uat"
    """Method, such as uat or vanilla; or your own code as python:MODULE:CLASS."""
    objective_name: Annotated[str | None, tyro.conf.arg(name="objective", metavar="NAME")] = None
    """Objective of the training: imitation of an expert, or ppo, which learns from rewards alone; unset: the usual one
    of the domain."""
    preset: str = "paper"
    """smoke (seconds), quick (minutes on two cores) or paper (the published settings)."""
    seed: int = 0
    """Seed of all trainings and of the suggestions."""
    out: Path | None = None
    """Folder of the sweep; unset: runs/tune-DOMAIN-METHOD-PRESET-SEED."""
    workers: int = 1
    """Trials at a time. With one, the same command gives the same trials again."""
    executor: ExecutorName = "local"
    """Run trials in processes on this machine (local), or on a Ray cluster."""
    address: str | None = None
    """Address of a running Ray cluster; unset: a local one is started."""
    device: Device = None
    """Device to run on; unset: CUDA if available."""
    threads: int | None = None
    """CPU threads of each worker; unset: UAT_THREADS, or one."""
    json: Switch = False
    """Print JSON rows, one per trial, instead of a table."""


def peek(args: list[str], prog: str = "uat train") -> dict[str, Any]:
    """Read the domain, the method, the objective and the preset, which decide the settings of a training."""

    def value_of(flag: str, default: str) -> str:
        """Return the value of the last such flag, as tyro does."""
        for i in reversed(range(len(args))):
            if args[i] == flag and i + 1 < len(args):
                return args[i + 1]
            if args[i].startswith(f"{flag}="):
                return args[i].split("=", 1)[1]
        return default

    asks_help = any(arg in ("-h", "--help") for arg in args)
    leads = bool(args) and not args[0].startswith("-")
    positional = args[0] if leads else next((arg for arg in args if is_address(arg) or arg in DOMAINS), None)
    if positional is None and not asks_help:
        raise ValueError(f"name a domain first: {prog} DOMAIN ...; known: {', '.join(DOMAINS)}")
    objective = value_of("--objective", "")
    return {
        "domain": named("domain", positional or DOMAINS.own[0], DOMAINS),
        "method": named("method", value_of("--method", "uat"), METHODS),
        "preset": lookup("preset", value_of("--preset", "paper"), PRESETS),
        "objective": lookup("objective", objective, OBJECTIVES) if objective else None,
    }


def named(kind: str, name: str, registry: Registry[Any]) -> str:
    """Return a known name or an address, whose code is imported because the user named it on the command line."""
    if is_address(name):
        look_in_current_folder()
        registry.adopt(name)
    return lookup(kind, name, registry)


def parse(kind: Any, args: list[str], prog: str, *, both_flags: bool = False) -> Any:
    """Parse with tyro, and turn its error message into a ValueError of one sentence.

    both_flags: give booleans two flags, `--x` and `--no-x`, so that the sentence in the help describes the first.
    """
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(kind, args=args, prog=prog, config=() if both_flags else (tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(one_sentence(message.getvalue(), prog)) from None


def one_sentence(framed: str, prog: str) -> str:
    """Return the first paragraph of tyro's framed message with the flag it suggests; a frame may be plain dashes."""
    lines = [line.strip("│╭╮╰╯|+ ") for line in framed.splitlines()]
    start = next((i for i, line in enumerate(lines) if set(line) == {"-"}), 0)  # in a plain frame, below the title
    if missing := required_names(framed):
        return f"{prog} needs {' and '.join(missing)}; see {prog} --help"
    paragraphs: list[list[str]] = [[]]
    for line in lines[start + 1 :]:
        if line and set(line) <= {"─", "-"}:
            paragraphs.append([])
        elif line:
            paragraphs[-1].append(line)
    sentence = re.sub(r"^Error parsing \w+: ", "", " ".join(paragraphs[0]).rstrip("."))
    close = next((p[1].split()[0] for p in paragraphs if p and p[0].startswith("Perhaps you meant") and p[1:]), None)
    return f"{sentence}; did you mean {close}?" if close else f"{sentence}; see {prog} --help"


def required_names(framed: str) -> list[str]:
    """Return the missing arguments of tyro's message: they are indented once, their explanations twice."""
    lines = [line.strip("│|+").rstrip() for line in framed.splitlines()]
    depths = [len(line) - len(line.lstrip()) for line in lines]
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith("Missing from ")), len(lines) - 1)
    listed = itertools.takewhile(lambda i: set(lines[i]) - set(" ─-"), range(first + 1, len(lines)))
    return [lines[i].strip() for i in listed if depths[i] == depths[first] + 4]
