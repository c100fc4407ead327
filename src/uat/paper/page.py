"""The demo page: one HTML file that draws everything from one embedded JSON object and loads nothing else.

Shape of the JSON: T steps, L layers; times and cells count from 0; a cell is row * grid + column;
a value marked `| null` is null where it does not apply.

    title, subtitle, command, device, version, task   text
    table      rows {method, label, accuracy, low, high, optimal_accuracy, efficiency,
               gap_closed | null, parameters | null, seconds | null}; low and high bound the 95 %
               interval. Rows "ceiling" and "random" also become reference lines of the curves.
    curves     {method: [{epoch, loss, accuracy | null}]}, accuracy on validation epochs only
    grid       cells per side
    actions    names, by action id
    episodes   [{name, policies: {method: policy}}], with per policy
        position   [T]  cell before action t          goal      [T]  cell
        action     [T]  id taken                      target    [T]  id the expert takes
        reward     [T]  what action t earned          cue       [T]  0 or 1
        attention  [L][T][T]  lower triangular, mean over heads, rows sum to 1
        gates      {rho: [T], g: [L][T]} | null, norms of the regime gate and of each layer's token gate
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from uat.files import write_atomically

TEMPLATE = "demo.html"
PLACEHOLDER = "__DATA__"


def write_page(data: Mapping[str, object], path: Path) -> None:
    """Write the page for `data` atomically."""
    write_atomically(path, fill(_template(), data).encode())


def fill(template: str, data: Mapping[str, object]) -> str:
    """Insert `data` into the template. Every `<` is escaped, so that no text can close the script around it."""
    text = json.dumps(dict(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    if template.count(PLACEHOLDER) != 1:
        raise ValueError(f"the template must hold {PLACEHOLDER} once, not {template.count(PLACEHOLDER)} times")
    return template.replace(PLACEHOLDER, text)


def _template() -> str:
    return resources.files("uat.evaluation").joinpath(TEMPLATE).read_text(encoding="utf-8")
