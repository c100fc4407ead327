"""The page on logs: its commands and its Python run, in the order in which they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_readme import quickened, shell_commands
from uat.adapters.logs import examples
from uat.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_works_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one folder, as a reader would, with fewer customers and shorter trainings."""
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCKS:
        if language == "python":
            small = text.replace("episodes=2000", "episodes=200").replace("-quick-", "-smoke-")
            exec(compile(small, "docs/logs.md", "exec"), {"__name__": "__main__"})
        elif language == "toml":
            Path("events.toml").write_text(text, encoding="utf-8")
        else:
            for words in shell_commands(language, text):
                assert words[0] == "uat"
                main(quickened(words)[1:])
    assert sorted(path.name for path in Path("runs").iterdir()) == ["events-uat-smoke-0", "events-vanilla-smoke-0"]


def test_the_page_names_every_trap_and_its_thresholds() -> None:
    from uat.adapters.logs import traps

    assert [name for name in examples.TRAPS if f"`{name}`" not in PAGE] == []
    plain = PAGE.replace("\n", " ")
    for text in (
        f"more than {traps.EXPLAINED:.0%} of the variance".replace("%", " %"),
        f"more than {traps.GIVEN_AWAY:.0%} of the actions".replace("%", " %"),
        f"more than {traps.COPIED:.0%} of the actions".replace("%", " %"),
        f"above {traps.TIED_TO_ACTION}",
        f"more than {traps.TIED_TO_REWARD:.0%} of its variance".replace("%", " %"),
        f"{traps.SAMPLE:,} rows",
    ):
        assert text in plain, text
