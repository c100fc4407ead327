"""A log as a domain: what is read is what the file says, in any format, and policies train on it and take raw rows."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import uat
from tests.builders import CPU, build_random
from uat.acting import replay
from uat.adapters.logs import LogsConfig, LogsDomain, preparation
from uat.adapters.logs.config import SHORT
from uat.adapters.logs.examples import Example, hidden_regime, write
from uat.adapters.logs.files import open_log
from uat.adapters.logs.keys import hashed
from uat.cli import main
from uat.config import override
from uat.contracts import read_every_by_steps
from uat.domains import DOMAINS, known_as
from uat.evaluation.scores import evaluate
from uat.files import FileError
from uat.recipes import compose
from uat.spec import Box, Discrete, Items, Named, Vector, Weights
from uat.tensor_files import RunError

SMALL = ["--preset", "smoke", "--train.epochs", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def example() -> Example:
    return hidden_regime(120, 10)


@pytest.fixture(scope="module")
def log(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(example, tmp_path_factory.mktemp("logs") / "events.parquet")


def domain_of(path: Path, roles: dict[str, Any], **settings: Any) -> LogsDomain:
    return LogsDomain(LogsConfig(path=str(path), **{**roles, **settings}))


def all_windows(domain: LogsDomain, split: Any) -> uat.Trajectory:
    recording = domain.simulator(split, "cpu")
    return recording.trajectory({"window": torch.arange(len(recording))})


# ---------------------------------------------------------------- reading


def test_every_row_is_in_one_window_of_one_split_and_unchanged(example: Example, log: Path) -> None:
    domain = domain_of(log, example.roles, horizon=4, standardise=False)
    names = domain.table.preparation.action_names
    seen = []
    for split in ("train", "validation", "test"):
        t = all_windows(domain, split)
        assert t.propensity is not None
        parts = domain.spec.obs.unpack(t.obs)  # pyright: ignore[reportAttributeAccessIssue]
        own = [parts["numbers"], t.action[..., None], t.reward[..., None], t.propensity[..., None]]
        seen.append(torch.cat([x.double() for x in own], dim=-1)[t.valid])
    offer = example.columns["offer"]
    ids = np.array([names.index(offer.names[code]) for code in offer.code_N])
    columns = [
        *(example.columns[f"x{i}"] for i in range(3)),
        ids,
        example.columns["clicked"],
        example.columns["propensity"],
    ]
    given = np.stack([np.asarray(x, dtype=np.float64) for x in columns], axis=1)
    assert np.array_equal(np.unique(torch.cat(seen).numpy(), axis=0), np.unique(given, axis=0))
    assert sum(map(len, seen)) == len(given)


def test_no_episode_is_in_two_splits_and_the_split_depends_on_its_name_alone(example: Example, log: Path) -> None:
    keys = domain_of(log, example.roles).table.keys
    parts = {e: set(keys.part_N[keys.episode_N == e].tolist()) for e in range(keys.episodes)}
    assert all(len(own) == 1 for own in parts.values())
    names = [str(i) for i in range(5000)]
    share, other = hashed(names, 0), hashed(names, 1)
    assert abs(np.quantile(share, [0.1, 0.5, 0.9]) - [0.1, 0.5, 0.9]).max() < 0.02
    assert abs(np.corrcoef(share, other)[0, 1]) < 0.05
    assert np.array_equal(share[7:9], hashed(names[7:9], 0))


def test_validation_and_test_come_later_if_the_split_is_by_time(example: Example, log: Path) -> None:
    keys = domain_of(log, {**example.roles, "time": "day"}, split="time").table.keys
    day_N = example.columns["day"][keys.order_N]
    assert day_N[keys.part_N == 0].max() < day_N[keys.part_N == 1].min()
    assert day_N[keys.part_N == 1].max() < day_N[keys.part_N == 2].min()


def test_a_column_may_hold_the_split(example: Example, tmp_path: Path) -> None:
    words = np.array(["train", "Validation", "test"])[example.columns["customer"] % 3]
    path = write(example.having(part=list(words)), tmp_path / "log.parquet")
    domain = domain_of(path, example.roles, split="column", split_column="part")
    assert domain.table.facts["train rows"] == domain.table.facts["test rows"] == 400
    assert "part" not in domain.table.preparation.categories


@pytest.mark.parametrize("suffix", [".csv", "large.csv", ".arrow", "folder"])
def test_all_formats_give_the_same_steps(
    example: Example, log: Path, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == "large.csv":
        monkeypatch.setattr("uat.adapters.logs.files.PARSED_ONCE", 1)
    if suffix == "folder":
        frame = pl.read_parquet(log)
        frame[:333].write_parquet(tmp_path / "a.parquet")
        frame[333:].write_parquet(tmp_path / "b.parquet")
        path = tmp_path
    else:
        path = write(example, tmp_path / f"log{suffix}")
    one, other = (domain_of(each, example.roles) for each in (log, path))
    assert one.spec == other.spec
    for split in ("train", "test"):
        a, b = all_windows(one, split), all_windows(other, split)
        assert torch.equal(a.action, b.action)
        assert torch.allclose(a.obs, b.obs, atol=1e-6)
        assert torch.equal(a.reward, b.reward)


def test_statistics_and_vocabularies_come_from_the_training_part_alone(example: Example, tmp_path: Path) -> None:
    keys = domain_of(write(example, tmp_path / "a.parquet"), example.roles).table.keys
    held_out = np.zeros(len(keys.order_N), dtype=bool)
    held_out[keys.order_N] = keys.part_N > 0
    region, x0 = example.columns["region"], example.columns["x0"] * 10 + 50
    names = [("other" if out else region.names[code]) for code, out in zip(region.code_N, held_out, strict=True)]
    path = write(example.having(region=names, x0=np.where(held_out, 1e6, x0)), tmp_path / "b.parquet")
    domain = domain_of(path, example.roles)
    prepared = domain.table.preparation
    assert prepared.categories == {"region": region.names}
    assert prepared.mean[0] == pytest.approx(x0[~held_out].mean(), rel=1e-6)
    assert prepared.scale[0] == pytest.approx(x0[~held_out].std(), rel=1e-6)
    train, test = (all_windows(domain, split) for split in ("train", "test"))
    unpacked = domain.spec.obs.unpack(test.obs)  # pyright: ignore[reportAttributeAccessIssue]
    assert (unpacked["region"] == -1).all()
    numbers = domain.spec.obs.unpack(train.obs)["numbers"][train.valid]  # pyright: ignore[reportAttributeAccessIssue]
    assert numbers.mean(0).abs().max() < 1e-4
    assert (numbers.std(0) - 1).abs().max() < 1e-2


def test_ends_cuts_and_the_observation_after_a_window(tmp_path: Path) -> None:
    columns = {
        "who": ["a"] * 5 + ["b"] * 2 + ["c"] * 2,
        "x": list(range(9)),
        "did": [0, 1, 0, 1, 0, 1, 0, 0, 1],
        "earned": [1.0, None, 2, 3, 4, 5, 6, 7, 8],
        "over": [False, False, False, False, True, False, False, False, True],
        "part": ["train"] * 5 + ["validation"] * 2 + ["test"] * 2,
    }
    pl.DataFrame(columns, strict=False).write_parquet(tmp_path / "log.parquet")
    roles = {"episode": "who", "action": ("did",), "reward": "earned", "done": "over"}
    settings = {"split": "column", "split_column": "part", "standardise": False, "observations": ("x",)}
    domain = domain_of(tmp_path / "log.parquet", roles, horizon=3, **settings)
    t = all_windows(domain, "train")
    assert domain.spec.obs == Vector(1)
    assert t.valid.tolist() == [[True, True, True], [True, True, False]]
    assert t.obs[..., 0].tolist() == [[0, 1, 2], [3, 4, 0]]
    assert t.action.tolist() == [[0, 1, 0], [1, 0, -1]]
    assert t.reward_known is not None
    assert t.reward_known.tolist() == [[True, False, True], [True, True, False]]
    assert t.terminated.tolist() == [[False] * 3, [False, True, False]]
    assert t.truncated is not None
    assert t.truncated.tolist() == [[False, False, True], [False] * 3]
    assert t.final_obs is not None
    assert t.final_obs[:, 0].tolist() == [3, 4]
    held_out = all_windows(domain, "validation")
    assert held_out.truncated is not None
    assert held_out.truncated.tolist() == [[False, True, False]]  # the log ends, the task did not
    assert domain.spec.reward_scale == pytest.approx(1 / np.std([1, 2, 3, 4]), rel=1e-3)


def test_an_end_begins_an_episode_where_no_column_names_it(tmp_path: Path) -> None:
    done = ([False, False, True] * 40)[:-1]
    columns = {"x": np.arange(119.0), "did": np.arange(119) % 2, "over": done}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    domain = domain_of(tmp_path / "log.parquet", {"action": ("did",), "done": "over"}, observations=("x",))
    assert domain.table.facts["episodes"] == 40
    assert domain.spec.horizon == 3
    assert [m.name for m in domain.metrics] == ["log_likelihood", "accuracy"]  # there is no reward


@pytest.mark.parametrize("form", ["list", "text", "flags"])
def test_allowed_actions(form: str, example: Example, tmp_path: Path) -> None:
    offer = example.columns["offer"]
    allowed_NA = np.random.default_rng(0).random((len(offer), 4)) < 0.5
    allowed_NA[np.arange(len(offer)), offer.code_N] = True
    lists = [[name for name, may in zip(offer.names, row, strict=True) if may] for row in allowed_NA]
    added: dict[str, Any] = {f"can_{name}": allowed_NA[:, i] for i, name in enumerate(offer.names)}
    if form != "flags":
        added = {"can": lists if form == "list" else ["|".join(own) for own in lists]}
    path = write(example.having(**added), tmp_path / "log.parquet")
    domain = domain_of(path, example.roles, allowed=("can_*",) if form == "flags" else ("can",))
    t = all_windows(domain, "train")
    assert t.allowed is not None
    rows = domain.table.keys.order_N[domain.table.keys.part_N == 0]
    assert np.array_equal(t.allowed[t.valid].numpy(), allowed_NA[rows])  # names of actions are sorted already
    assert domain.table.roles.categories == ("region",)


def test_another_column_may_be_imitated(example: Example, tmp_path: Path) -> None:
    path = write(example.with_best(), tmp_path / "log.parquet")
    domain = domain_of(path, example.roles, target="best")
    t = all_windows(domain, "test")
    rows = domain.table.keys.order_N[domain.table.keys.part_N == 2]
    assert np.array_equal(t.required_target[t.valid].numpy(), example.best_N[rows])
    assert np.array_equal(t.action[t.valid].numpy(), example.columns["offer"].code_N[rows])
    assert "best" not in domain.table.preparation.categories
    scored = replay(domain.references()["random"], domain.simulator("test", "cpu"), {"window": torch.arange(3)})
    assert domain.summarise(domain.measure(scored))["accuracy"].mean() == pytest.approx(0.25)
    with pytest.raises(FileError, match=r"row 1, column region: the action '.*' is unknown: it never occurs"):
        domain_of(path, example.roles, target="region", observations=("x*",))


@pytest.mark.parametrize("kind", ["numbers", "weights"])
def test_continuous_actions(kind: Any, example: Example, tmp_path: Path) -> None:
    share_NA = np.random.default_rng(0).dirichlet([1, 1, 1], len(example.columns["day"]))
    path = write(example.having(**{f"share{i}": share_NA[:, i] for i in range(3)}), tmp_path / "log.parquet")
    roles = {**example.roles, "action": ("share*",), "observations": ("x*",), "propensity": ""}
    domain = domain_of(path, roles, action_kind=kind)
    assert isinstance(domain.spec.action, Box if kind == "numbers" else Weights)
    assert all_windows(domain, "train").action.shape[-1] == 3
    policy = build_random("uat", domain.spec, dtype=torch.float32)
    scored = replay(policy, domain.simulator("test", "cpu"), {"window": torch.arange(3)})
    values = domain.summarise(domain.measure(scored))
    assert values.keys() == {"log_likelihood", "error", "logged_reward"}
    assert all(x.isfinite().all() for x in values.values())
    assert domain.action_name(torch.tensor([0.2, 0.3, 0.5])) == pytest.approx(
        {"share0": 0.2, "share1": 0.3, "share2": 0.5}
    )
    with pytest.raises(ValueError, match="have no ids"):
        domain.action_id("share0")


def test_minari_datasets_become_logs_if_minari_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Episode:
        def __init__(self, steps: int) -> None:
            self.observations = {"place": np.arange(2.0 * steps + 2).reshape(-1, 2), "item": np.zeros(steps + 1)}
            self.actions, self.rewards = np.linspace(-1, 1, steps)[:, None], np.ones(steps)
            self.terminations = np.arange(steps) == steps - 1

    dataset = types.SimpleNamespace(iterate_episodes=lambda: [Episode(3 + i % 4) for i in range(60)])
    with pytest.raises(ValueError, match="needs minari: pip install"):
        LogsDomain(known_as("logs:minari:a/b-v0")[1])
    monkeypatch.setitem(sys.modules, "minari", types.SimpleNamespace(load_dataset=lambda name: dataset))
    name, config = known_as("logs:minari:a/b-v0")
    domain = LogsDomain(config)
    assert name == "logs:a+b-v0"
    assert domain.table.preparation.numbers == ("obs_place_0", "obs_place_1", "obs_item")
    assert isinstance(domain.spec.action, Box)
    assert domain.spec.action.high == pytest.approx((1.2,))  # a tenth of the range of actions as a margin
    assert domain.spec.horizon == 6


# ---------------------------------------------------------------- scores


def test_answers_at_every_step_equal_those_step_by_step(example: Example, log: Path) -> None:
    domain = domain_of(log, example.roles)
    batch = domain.spec.clock.batch(all_windows(domain, "test"))
    policy = build_random("uat", domain.spec)
    fast, slow = policy.read_every(batch), read_every_by_steps(policy, batch)
    rows = slice(0, batch.valid.numel())
    assert torch.allclose(fast.every(rows), slow.every(rows), atol=1e-9)


def test_scores_are_means_over_all_real_steps(example: Example, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = domain_of(log, example.roles, horizon=4)
    monkeypatch.setattr("uat.adapters.logs.domain.AT_ONCE", 7 * 4)  # in many pieces
    recording, policy = domain.simulator("test", "cpu"), build_random("uat", domain.spec, dtype=torch.float32)
    scored = replay(policy, recording, {"window": torch.arange(len(recording))})
    values = domain.summarise(domain.measure(scored))
    with torch.no_grad():
        law = policy.distribution(policy.logits(domain.spec.clock.batch(scored)))
    expected = law.log_prob(scored.action)[scored.valid].mean()
    assert values["log_likelihood"].mean() == pytest.approx(float(expected), abs=1e-5)
    right = (law.mode == scored.action)[scored.valid].float().mean()
    assert values["accuracy"].mean() == pytest.approx(float(right), abs=1e-6)
    assert values["logged_reward"].mean() == pytest.approx(float(scored.reward[scored.valid].mean()), abs=1e-6)


def test_references_know_the_habits_of_the_logging_policy(tmp_path: Path) -> None:
    """The action alternates, so the previous one gives it away, and its share does not."""
    columns = {"who": np.repeat(np.arange(200), 6), "did": ["a", "b", "a", "b", "a", "b"] * 200}
    pl.DataFrame(columns).write_parquet(tmp_path / "log.parquet")
    domain = domain_of(tmp_path / "log.parquet", {"episode": "who", "action": ("did",)})
    likelihood = {}
    for name, agent in domain.references().items():
        scored = replay(agent, domain.simulator("test", "cpu"), {"window": torch.arange(domain.episodes["test"])})
        likelihood[name] = float(domain.summarise(domain.measure(scored))["log_likelihood"].mean())
    assert likelihood["random"] == pytest.approx(np.log(0.5))
    assert likelihood["frequent"] == pytest.approx(np.log(0.5), abs=0.01)
    assert likelihood["repeat"] > -0.02
    assert domain.spec.obs == Vector(1)  # nothing is observed


def test_recordings_follow_the_contract_of_worlds(example: Example, log: Path) -> None:
    """Noise depends on seed and id alone, finite splits hold every window once, and nothing is read on the host."""
    domain = domain_of(log, example.roles)
    for split in ("train", "validation", "test"):
        worlds: Any = domain.simulator(split, "cpu")  # pyright: ignore[reportArgumentType]
        ids, some = torch.arange(40), torch.tensor([31, 5, 0, 5])
        whole, part = worlds.noise(ids, 7)["window"], worlds.noise(some, 7)["window"]
        assert torch.equal(part, whole[some])
        other = worlds.noise(ids, 8)["window"]
        assert torch.equal(other, whole) == (split != "train")
        count = domain.episodes.get(split)
        if count is not None:
            assert worlds.noise(torch.arange(count + 1), 0)["window"].tolist() == [*range(count), 0]
    agents = {**domain.references(), "policy": build_random("uat", domain.spec).to("meta")}
    recording = domain.simulator("test", "meta")
    for agent in agents.values():
        scored = replay(agent, recording, {"window": torch.arange(5, device="meta")})
        assert all(value.shape == (5,) for value in domain.measure(scored).values())
    few = domain_of(log, example.roles, test_windows=3, horizon=4)
    assert few.episodes["test"] == len(few.simulator("test", "cpu")) == 3


def test_a_cloned_policy_beats_the_references_and_takes_raw_rows_without_the_log(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = example.columns["x0"].astype(np.float64) * 1e6 + 3e7
    path = write(example.having(x0=raw), tmp_path / "events.parquet")
    settings = {f"domain.{name}": value for name, value in example.roles.items()}
    settings |= {"train.epochs": 16, "train.validate_every": 16, "train.lr": 2e-2}
    run = uat.train("logs:events.parquet", preset="smoke", settings=settings, device="cpu")
    assert run.path == Path("runs/events-uat-smoke-0")
    scores = {(s.method, s.metric): s.value for s in evaluate(run, device="cpu").scores}
    assert scores["uat", "log_likelihood"] > scores["frequent", "log_likelihood"] + 0.03
    assert scores["uat", "logged_reward"] == scores["repeat", "logged_reward"]
    domain = run.config.build_domain()
    recorded = all_windows(domain, "test")
    with torch.no_grad():
        answers = uat.load(run.path).logits(domain.spec.clock.batch(recorded))[0].argmax(-1)
    write(hidden_regime(120, 10, seed=1), path)
    with pytest.raises(RunError, match=r"events\.parquet is not the file that runs/events-uat-smoke-0 was trained on"):
        evaluate(run, device="cpu")
    path.unlink()

    prepared, session = preparation(run), uat.Session(uat.load(run.path))
    assert prepared == domain.table.preparation
    first = int(domain.table.windows["test"].begin_W[0])
    rows = pl.DataFrame({n: c for n, c in example.having(x0=raw).columns.items() if not hasattr(c, "names")})
    region, offer = example.columns["region"], example.columns["offer"]
    for t in range(5):
        row = domain.table.keys.order_N[first + t]
        raw_row = {**rows.row(row, named=True), "region": region.names[region.code_N[row]]}
        feedback: dict[str, Any] = {}
        if t:
            taken = prepared.action_id(offer.names[offer.code_N[row - 1]])
            feedback = {"action": torch.tensor([taken]), "reward": float(rows["clicked"][int(row - 1)])}
        action = session.act(prepared.observation(raw_row), **feedback)
        assert int(action) == int(answers[t])
        assert prepared.action_name(action) == offer.names[int(action)]


# ---------------------------------------------------------------- names, settings and the command line


def test_the_command_line_trains_on_a_log(
    example: Example, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(example, tmp_path / "events.parquet")
    flags = ["--action", "offer", "--reward", "clicked", "--episode", "customer", "--domain.time=day"]
    main(["train", "logs:events.parquet", *flags, *SMALL, "--json"])
    [row] = json.loads(capsys.readouterr().out)
    assert row["run"] == "runs/events-uat-smoke-0"
    assert "validation/log_likelihood" in row
    with pytest.raises(SystemExit):
        main(["train", "logs:events.parquet", "--action", "offr", *SMALL, "--out", "runs/other"])
    assert "no column 'offr' (domain.action); did you mean 'offer'?" in capsys.readouterr().err
    assert not Path("runs/other").exists()  # nothing half-written


def test_settings_beside_a_log_are_its_defaults(example: Example, tmp_path: Path) -> None:
    path = write(example, tmp_path / "events.parquet")
    path.with_suffix(".toml").write_text('action = "offer"\nreward = "clicked"\nepisode = "customer"\nhorizon = 5\n')
    config = compose(f"logs:{path}", "vanilla", "smoke", settings={"domain.horizon": 7})
    assert (config.domain.action, config.domain.reward, config.domain.horizon) == (("offer",), "clicked", 7)
    path.with_suffix(".toml").write_text('actoin = "offer"\n')
    with pytest.raises(ValueError, match="set 'actoin', which is not a setting of a log; did you mean 'action'"):
        known_as(f"logs:{path}")
    path.with_suffix(".toml").write_text("action = [offer\n")
    with pytest.raises(FileError, match="is not valid TOML"):
        known_as(f"logs:{path}")


def test_identity_depends_on_contents_and_not_on_folders(example: Example, log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "events.parquet"
    copy.write_bytes(log.read_bytes())
    settings = {f"domain.{name}": value for name, value in example.roles.items()}
    one, same = (compose(f"logs:{path}", preset="smoke", settings=settings) for path in (log, copy))
    assert one.domain_name == "logs:events"
    assert one.identity() == same.identity()
    assert one.identity() != override(one, {"domain.horizon": 5}).identity()
    before = same.identity()
    write(example.having(x0=example.columns["x0"] + 1), copy)
    assert same.identity() != before


def test_objects_and_names_are_one_domain(example: Example, log: Path) -> None:
    domain = domain_of(log, example.roles)
    assert known_as(domain) == ("logs:events", domain.config)
    assert DOMAINS["logs:events"].build is LogsDomain
    assert "logs:events" not in list(DOMAINS)
    assert {*SHORT} <= {item.name for item in dataclasses.fields(LogsConfig)}


def test_a_table_is_read_once_until_its_file_changes(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(example, tmp_path / "log.parquet"), []
    monkeypatch.setattr("uat.adapters.logs.table.open_log", lambda p: opened.append(p) or open_log(p))
    one, other = domain_of(path, example.roles), domain_of(path, example.roles)
    assert one.table is other.table
    assert len(opened) == 1
    write(hidden_regime(120, 10, seed=5), path)
    assert domain_of(path, example.roles).table is not one.table


# ---------------------------------------------------------------- raw rows


def prepared_example(example: Example, log: Path, **settings: Any) -> Any:
    return domain_of(log, example.roles, **settings).table.preparation


ROW = {"x0": 0.5, "x1": "1.5", "x2": np.float32(2), "region": "north", "customer": 7}


def test_rows_become_observations_of_streams(example: Example, log: Path) -> None:
    prepared = prepared_example(example, log)
    obs = prepared.observation([ROW, {**ROW, "region": "atlantis"}])
    assert obs["region"].tolist() == [1, -1]
    assert torch.allclose(
        obs["numbers"][0], (torch.tensor([0.5, 1.5, 2]) - torch.tensor(prepared.mean)) / torch.tensor(prepared.scale)
    )
    assert isinstance(prepared.observation_space, Named)
    items = dataclasses.replace(prepared, numbers=(), mean=(), scale=())
    assert items.observation_space == Items(4)
    assert items.observation(ROW).tolist() == [1]
    assert prepared.action_space == Discrete(4)
    assert prepared.action_id("gift") == 1


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({k: v for k, v in ROW.items() if k != "x1"}, "the row has no column 'x1'; known: x0, x2, region, customer"),
        ({**ROW, "x0": "abc"}, "column x0: 'abc' is not a finite number"),
        ({**ROW, "x0": float("inf")}, "column x0: inf is not a finite number"),
        ({**ROW, "x0": None}, "column x0: a number is missing; train with domain.missing=fill"),
        ({**ROW, "region": None}, "column region: a category is missing"),
        (7, "a row must map names of columns to values, got 7"),
    ],
)
def test_rows_that_cannot_be_observed(row: Any, sentence: str, example: Example, log: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        prepared_example(example, log).observation([row])


def test_unknown_names_while_acting(example: Example, log: Path) -> None:
    refusing = prepared_example(example, log, unknown="refuse", missing="fill")
    with pytest.raises(
        ValueError, match="column region: 'nrth' never occurs in the training part; did you mean 'north'"
    ):
        refusing.observation({**ROW, "region": "nrth"})
    assert refusing.observation({**ROW, "region": None, "x0": None})["region"].tolist() == [-1]
    assert refusing.observation({**ROW, "x0": None})["numbers"][0, 0] == 0
    with pytest.raises(ValueError, match="unknown action 'gfit'; did you mean 'gift'"):
        refusing.action_id("gfit")
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 4\), got 4"):
        refusing.action_name(4)


def test_damaged_preparations_are_refused(example: Example, log: Path, tmp_path: Path) -> None:
    good = prepared_example(example, log).to_json()
    file = tmp_path / "preparation.json"
    file.write_text(json.dumps(good))
    assert preparation(tmp_path).to_json() == good
    for change in ({"format": 2}, {"mean": [0.0]}, {"scale": [1, 0, 1]}, {"categories": 3}, {"action_names": [1, 2]}):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(FileError, match=r"preparation\.json is not a preparation: "):
            preparation(tmp_path)
    file.unlink()
    with pytest.raises(FileError, match=r"holds no preparation\.json"):
        preparation(tmp_path)


def test_reading_needs_polars_and_says_so(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ValueError, match=r"needs polars: pip install 'uat-transformer\[data\]'"):
        known_as(f"logs:{log}")


def test_known_propensities_are_kept_by_hand_made_logs() -> None:
    spec = uat.Spec(obs=Vector(1), action=Discrete(2), horizon=2)
    steps: dict[str, Any] = {"obs": torch.zeros(1, 2, 1), "action": torch.tensor([[0, 1]]), "reward": torch.zeros(1, 2)}
    t = uat.episodes(spec, **steps, propensity=[[0.5, 1.0]])
    assert t.propensity is not None
    assert t.propensity.tolist() == [[0.5, 1.0]]
    assert t.to(CPU).propensity is not None
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="propensity: expected"):
            uat.episodes(spec, **steps, propensity=[[0.5, wrong]])
