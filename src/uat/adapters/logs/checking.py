"""`uat data check logs:FILE`: what a log holds, what is odd, and whether it can be used."""

from __future__ import annotations

from typing import Any

from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log, open_log
from uat.adapters.logs.findings import Checked, Findings
from uat.adapters.logs.table import Table, read
from uat.adapters.logs.traps import find_traps
from uat.spec import Box, Discrete


def check(config: LogsConfig) -> Checked:
    """Return facts and findings of a log. A log that cannot be read at all has one finding, an error."""
    findings, facts = Findings(collect=True), {}
    try:
        log = open_log(config.path)
        facts = {"columns": ", ".join(log.kinds)}
        table = read(config, findings, log)
        find_traps(config, log, table, findings)
        log.check_unchanged()
        facts |= facts_of(config, log, table)
    except ValueError as error:
        findings.error("unreadable", 1, str(error))
    return Checked(path=config.path, facts=facts, findings=tuple(findings.found))


def facts_of(config: LogsConfig, log: Log, table: Table) -> dict[str, Any]:
    """Return counts and ranges of a log's contents."""
    prepared, action = table.preparation, table.spec.action
    facts: dict[str, Any] = {name: f"{value:,}" for name, value in table.facts.items()}
    facts["windows"] = ", ".join(f"{len(w):,} {split}" for split, w in table.windows.items())
    facts["steps of a window"] = f"at most {table.spec.steps}"
    facts["numbers"] = ", ".join(prepared.numbers) or "none"
    facts["categories"] = ", ".join(f"{name} ({len(names)})" for name, names in prepared.categories.items()) or "none"
    match action:
        case Discrete():
            facts["actions"] = _shares(table)
        case Box():
            facts["action"] = ", ".join(
                f"{n} in [{low:.4g}, {high:.4g}]"
                for n, low, high in zip(prepared.action, action.low, action.high, strict=True)
            )
        case _:
            facts["action"] = f"weights of {', '.join(prepared.action)}"
    if config.reward:
        reward_N, known_N = table.steps.reward_N, table.steps.known_N
        known = (reward_N if known_N is None else reward_N[known_N]).double()
        if len(known):
            facts["reward"] = (
                f"{known.mean():.4g} on average, from {known.min():g} to {known.max():g}, {len(known):,} known"
            )
    if table.keys.step is not None:
        facts["time"] = f"regular, a step is {table.keys.step:g}"
    if table.roles.unused:
        facts["columns without a role"] = ", ".join(table.roles.unused)
    return facts


def _shares(table: Table) -> str:
    """Return the most frequent actions of the training part, with their shares."""
    names = table.preparation.action_names
    if table.action_counts is None:
        return f"{len(names)} names"
    count_A = table.action_counts.sum(0)
    order = count_A.argsort(descending=True, stable=True)[:10].tolist()
    shares = ", ".join(f"{names[i]} {count_A[i] / count_A.sum():.1%}" for i in order)
    return shares if len(names) <= 10 else f"{len(names)}, such as {shares}"
