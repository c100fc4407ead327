"""A run folder: commands exchange data through it alone.

  config.json          every setting                          policy.safetensors   the best weights, with their spec
  manifest.json        version, commit, device, command       state/               enough to resume to the same numbers
  metrics.jsonl        one row per epoch, no wall times        scores.jsonl         scores of evaluations
  timing.jsonl         the wall times                       preparation.json     how raw rows of a log are observed

Files are written under a temporary name and renamed; loading never unpickles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from uat import lock
from uat.config import RunConfig, from_json, lookup, run_config_from_json, spec_from_json, spec_to_json, to_json
from uat.domains import DOMAINS, Domain, as_domain
from uat.domains import known_as as domain_known_as
from uat.files import (
    FileError,
    append_rows,
    check_path,
    is_temporary,
    parse_row,
    read_json,
    read_text,
    row_lines,
    write_atomically,
)
from uat.manifest import manifest
from uat.methods import METHODS, Method, Policy, known_as
from uat.registry import is_address
from uat.rows import EPOCHS, SCORES, SECONDS, check_row
from uat.settings import changed_fields, checked, shown, with_current_names
from uat.spec import Spec
from uat.tensor_files import RunError, copied, first_not_finite, read_tensors, write_tensors

PREPARED = frozenset({"config.json", "manifest.json", "preparation.json", "tensorboard", lock.FILE})
"""Files of a folder whose training has written nothing yet; another run may still take such a folder."""

LOGS = frozenset({"metrics.jsonl", "timing.jsonl"})

COLUMNS = {"metrics.jsonl": EPOCHS, "timing.jsonl": SECONDS, "scores.jsonl": SCORES}


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk."""

    path: Path
    config: RunConfig

    @staticmethod
    def create(config: RunConfig, path: Path | str, *, resume: bool = False, device: torch.device | str = "cpu") -> Run:
        """Prepare a folder for this run; a folder of another run is never touched."""
        run = Run(check_path(path, "path"), config)
        if run.is_there(resume=resume):
            return run
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_json("config.json", to_json(config))
        content = DOMAINS[config.domain_name].content(config.domain)
        run.write_json("manifest.json", {**manifest(device), "data": dict(content)})
        return run

    def is_there(self, *, resume: bool) -> bool:
        """Whether the folder already holds this run; raise a RunError if this run cannot use the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another folder with --out (in Python out=...)")
        names = {file.name for file in self.path.iterdir() if not is_temporary(file)} if self.path.exists() else set()
        if names <= {lock.FILE}:
            return False
        if "config.json" not in names:
            raise RunError(
                f"{self.path} holds other files; choose an empty or new folder with --out (in Python out=...)"
            )
        other = Run.open(self.path)
        if names <= PREPARED:
            return resume and other.config.identity() == self.config.identity()
        if other.config.identity() != self.config.identity():
            raise RunError(
                f"{self.path} holds another run ({describe(other.config)}); choose another folder with --out "
                "(in Python out=...)"
            )
        if not resume:
            raise RunError(
                f"{self.path} already holds this run; continue it with --resume (in Python resume=True), "
                "or choose another folder with --out (in Python out=...)"
            )
        return True

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Lock the folder during a training.

        If the training fails before it has written anything, remove the prepared files, and the folder if it is new.
        """
        new = not self.path.exists()
        empty = new or not any(self.path.iterdir())
        with lock.locked(self.path, f"training {describe(self.config)}"):
            try:
                yield
            except BaseException:
                self._clear(folder_too=new, board_too=empty)
                raise

    def _clear(self, *, folder_too: bool, board_too: bool) -> None:
        """Remove the prepared files if the training has logged no row and written no checkpoint."""
        names = {file.name for file in self.path.iterdir()}
        empty = {name for name in names & LOGS if not self.file(name).stat().st_size}
        if names - empty <= (PREPARED if board_too else PREPARED - {"tensorboard"}):
            shutil.rmtree(self.file("tensorboard"), ignore_errors=True)
            for name in sorted(names - {"tensorboard"}):
                self.file(name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process uses the folder by now
                if folder_too:
                    self.path.rmdir()

    @staticmethod
    def open(path: Path | str, name: str = "run", *, trust: bool = False) -> Run:
        """Open the run in a folder.

        name: the caller's name of the argument, for error messages.
        trust: import the code that the run's config names (`python:module:name`); it is refused otherwise.
        """
        file, data = read_config(path, name)
        try:
            if checked(trust, bool, "trust"):
                adopt_named(data)
            return Run(file.parent, run_config_from_json(data))
        except (ValueError, TypeError) as error:
            raise RunError(f"{file}: {error}") from None

    def file(self, name: str) -> Path:
        return self.path / name

    def write_json(self, name: str, data: Any) -> None:
        write_atomically(self.file(name), (json.dumps(data, indent=2) + "\n").encode())

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        append_rows(self.file(name), rows)

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        write_atomically(self.file(name), row_lines(rows).encode())

    def lines(self, name: str) -> list[str]:
        """Return the lines of a .jsonl file, without a last line that is incomplete because the process was killed."""
        if not self.file(name).exists():
            return []
        return read_text(self.file(name)).split("\n")[:-1]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the checked rows of a .jsonl file, without a last line that is incomplete."""
        places = ((line, f"{self.file(name)}, line {n}") for n, line in enumerate(self.lines(name), 1))
        return [check_row(parse_row(line, where), COLUMNS.get(name, {}), where) for line, where in places]


def opened(run: Run | Path | str, *, trust: bool = False, domain: Any = None) -> Run:
    """Return the run itself, or open the run in a folder.

    trust: import the code that the run's config names; it is refused otherwise.
    domain: the domain object or environment that the run was trained in, if its code has neither a name nor an address.
    """
    checked(trust, bool, "trust")
    given = None if domain is None else domain_known_as(as_domain(domain, "domain"))
    run = run if isinstance(run, Run) else Run.open(run, trust=trust)
    if given is not None:
        own = {"name": run.config.domain_name, **to_json(run.config.domain)}
        # an environment determines the settings that describe it, and no others
        known = to_json(given[1]) if isinstance(domain, Domain) else {**own, **changed_fields(given[1])}
        if difference := first_difference({**known, "name": given[0]}, own, ""):
            raise RunError(f"{run.path} was not trained in the given domain: {difference}")
    return run


def read_config(path: Path | str, name: str = "run") -> tuple[Path, dict[str, Any]]:
    """Return the file of a run's config and its JSON, unchecked."""
    file = check_path(path, name) / "config.json"
    if not file.is_file():
        missing = "it has no config.json" if file.parent.exists() else "it does not exist"
        raise RunError(f"{file.parent} is not a run folder: {missing}")
    try:
        return file, read_json(file)
    except FileError as error:
        raise RunError(str(error)) from None


def adopt_named(data: Mapping[str, Any]) -> None:
    """Import the code that a run's config names; call it only if the user trusts that config."""
    for key, registry in (("domain_name", DOMAINS), ("method_name", METHODS)):
        if is_address(name := data.get(key)):
            registry.adopt(cast(str, name))


def describe(config: RunConfig) -> str:
    return (
        f"{config.method_name} on {config.domain_name}, preset {config.preset}, seed {config.seed}, {config.identity()}"
    )


# ---------------------------------------------------------------- policies


def save_policy(
    path: Path | str,
    policy: Policy,
    method_name: str | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    domain: Any = None,
) -> None:
    """Write a policy to one file for `load_policy`: weights, method, config and spec, which is all it needs to act.

    A policy that `load_policy` would refuse raises a ValueError here.

    method_name: a registered name or an address; unset: the name under which the policy's class is registered, or else
        its address, which `load_policy` imports only with trust=True.
    domain: config of the domain in which the policy was trained; None: unknown.
    """
    path = check_path(path, "path")
    kind = type(checked(policy, Policy, "policy"))
    name = known_as(kind)[0] if method_name is None else method_name
    method = _check_method(policy, name)
    if domain is not None and not _is_config_of_a_domain(domain):
        raise ValueError(f"domain={shown(domain)} must be the config of a domain, or None")
    if weights is None or not checked(weights, Mapping, "weights"):
        weights = cast(Mapping[str, Tensor], policy.state_dict())
    meta = {"method": name, "config": to_json(policy.config), "spec": spec_to_json(policy.spec)}
    try:
        check_weights(policy, weights)
        _check_description(method, policy, meta, weights)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} was not written: {error}") from None
    write_tensors(path, copied(weights, torch.device("cpu")), {**meta, "domain": to_json(domain)})


def _is_config_of_a_domain(config: Any) -> bool:
    return any(type(config) is entry.config for entries in (DOMAINS.loaded(), DOMAINS) for entry in entries.values())


def _check_method(policy: Policy, name: str) -> Method:
    """Return the method of this name; raise if `load_policy` would not build the same policy from it."""
    method = METHODS[lookup("method_name", name, METHODS)]
    if type(policy) is not method.policy or type(policy.config) is not method.config:
        raise ValueError(
            f"method_name={name!r} is a {method.policy.__name__} with a {method.config.__name__}; the policy is a "
            f"{type(policy).__name__} with a {type(policy.config).__name__}"
        )
    if replace(policy.config, **method.changes) != policy.config:
        raise ValueError(f"method_name={name!r} sets {dict(method.changes)}; the policy's config says otherwise")
    return method


def _check_description(method: Method, policy: Policy, meta: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise unless settings and spec survive JSON unchanged, and build a policy with the same weights."""
    stored = json.loads(json.dumps(meta))
    config, spec = from_json(method.config, stored["config"], "method"), spec_from_json(stored["spec"])
    for what, own, back in (("settings", policy.config, config), ("spec", policy.spec, spec)):
        if own != back:
            raise ValueError(f"the policy's {what} {shown(own)} would be read back as {shown(back)}")
    check_weights(empty_policy(method, spec, config, weights), weights)


def load_policy(path: Path | str, *, trust: bool = False) -> Policy:
    """Load the policy of a run folder or a policy file, ready to act. The domain it was trained in is not needed.

    trust: import the code that the file names as its method (`python:module:name`); it is refused otherwise.
    """
    path = check_path(path, "path")
    checked(trust, bool, "trust")
    if not path.is_dir():
        return _build(path, *read_tensors(path), trust=trust)
    config_file, data = read_config(path)
    own = _own_sections(config_file, data, trust=trust)
    file = path / "policy.safetensors"
    tensors, meta = read_tensors(file)
    for name, section in own.items():
        stored = with_defaults(meta.get(name), section)
        if difference := first_difference(stored, to_json(section), name):
            raise RunError(f"{file} does not belong to {config_file}: {difference}")
    return _build(file, tensors, meta, trust=trust)


def _own_sections(file: Path, data: Mapping[str, Any], *, trust: bool) -> dict[str, Any]:
    """Return the method's part of a run's config, and the domain's part if the domain's code is available."""
    try:
        name, domain = data.get("method_name"), data.get("domain_name")
        if trust and is_address(name):
            METHODS.adopt(cast(str, name))
        if isinstance(domain, str) and domain not in DOMAINS:
            method = METHODS[lookup("method", cast(str, name), METHODS)]
            return {"method": name, "config": from_json(method.config, data.get("method"), "method")}
        config = run_config_from_json(data)
    except (ValueError, TypeError) as error:
        raise RunError(f"{file}: {error}") from None
    return {"method": config.method_name, "config": config.method, "domain": config.domain}


def with_defaults(stored: Any, section: Any) -> Any:
    """Return a section of a config as a file stores it, or the run's own if the file has none.

    Settings added since the file was written take their defaults.
    """
    if not stored or not dataclasses.is_dataclass(section) or not isinstance(stored, Mapping):
        return stored or to_json(section)
    return {**to_json(type(section)()), **with_current_names(type(section), stored)}


def first_difference(found: Any, expected: Any, name: str) -> str | None:
    """Describe the first difference between two JSON values; None if they are equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in {**expected, **found}:
            if difference := first_difference(found.get(key), expected.get(key), f"{name}.{key}".lstrip(".")):
                return difference
        return None
    return None if found == expected else f"its {name} is {found}, expected {expected}"


def _build(file: Path, tensors: dict[str, Tensor], meta: dict[str, Any], *, trust: bool = False) -> Policy:
    method = _method_in(file, meta.get("method"), trust=trust)
    try:
        spec, config = spec_from_json(meta["spec"]), from_json(method.config, meta["config"], "method")
        check_weights(empty_policy(method, spec, config, tensors), tensors)
        policy = method.build(spec, config)
        policy.expect(tensors)
        fit_weights(policy, tensors)
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{file}: {error}") from None
    return policy.eval()


def _method_in(file: Path, name: Any, *, trust: bool) -> Method:
    """Return the method that a policy file names."""
    try:
        if trust and is_address(name):
            return METHODS.adopt(name)
        if isinstance(name, str) and name in METHODS:
            return METHODS[name]
    except ValueError as error:
        raise RunError(f"{file}: {error}") from None
    reason = METHODS.unsupported_reason(name)
    raise RunError(
        f"{file} holds the method {name!r}, which this version does not know" if reason is None else f"{file}: {reason}"
    )


def empty_policy(method: Method, spec: Spec, config: Any, weights: Iterable[str] = ()) -> Policy:
    """Build a policy on the meta device: its weights have names and shapes, and take no memory.

    weights: names of the weights that will be loaded, for policies with optional parts.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        policy = method.build(spec, config)
        policy.expect(weights)
    return policy


def fit_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Load the weights; raise a ValueError that names the first one that does not fit."""
    check_weights(policy, tensors)
    policy.to(next(iter(tensors.values())).dtype)
    policy.load_state_dict(dict(tensors))


def check_weights(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless names and shapes of the weights are the policy's, and all values are finite."""
    own = policy.state_dict()
    for name in sorted(own.keys() | tensors.keys(), key=str):
        if name not in tensors:
            raise ValueError(f"the weight {name} is missing")
        if name not in own:
            label = name if isinstance(name, str) else shown(name)
            raise ValueError(f"the weight {label} is unknown to {type(policy).__name__}")
        if not isinstance(tensors[name], Tensor) or tensors[name].is_meta:
            raise ValueError(f"the weight {name} must be a tensor with values, got {shown(tensors[name])}")
        if own[name].shape != tensors[name].shape:
            raise ValueError(
                f"the weight {name} has shape {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
            )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != own[name].is_floating_point() or tensor.is_complex():
            raise ValueError(f"the weight {name} is of {tensor.dtype}, expected {own[name].dtype}")
    if problem := first_not_finite(tensors):
        raise ValueError(f"{problem}, where only finite numbers can be")
