"""The table of `docs/clusters.md`, out of the kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cluster.said import WIDE, off_text
from remat.formats import percent_text

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
BEGIN, END = "<!-- clusters -->\n", "<!-- /clusters -->\n"
HEAD = (
    "| job | its mesh | published | ours | best mesh | its step |",
    "|---|---|--:|--:|---|--:|",
)


def table(kept: dict[str, Any]) -> str:
    """One row a job."""
    rows = [_row(name, facts) for name, facts in kept.items()]
    dates = sorted({facts["date"] for facts in kept.values()})
    torch = next(iter(kept.values()))["versions"]["torch"]
    return "\n".join([*HEAD, *rows, "", f"torch {torch}, {dates[-1]}.", ""])


def _row(name: str, facts: dict[str, Any]) -> str:
    ours, free = facts["on_its_mesh"], facts.get("free")
    cells = [name, _mesh(ours), _published(facts), _ours(facts)]
    cells += [_mesh(free) + _doubt(free), f"{free['step_s']:.2f} s"] if free else ["-", "-"]
    return f"| {' | '.join(cells)} |"


def _mesh(one: dict[str, Any] | None) -> str:
    """``8·1·35·1``: tp, cp, pp, dp."""
    return "-" if one is None else "·".join(str(one[name]) for name in ("tp", "cp", "pp", "dp"))


def _doubt(free: dict[str, Any]) -> str:
    return " ?" if free["states_over"] > WIDE else ""


def _published(facts: dict[str, Any]) -> str:
    if facts["published_s"]:
        return f"{facts['published_s']:.2f} s"
    return f"MFU {percent_text(facts['published_mfu'])}"


def _ours(facts: dict[str, Any]) -> str:
    ours = facts["on_its_mesh"]
    if not facts["published_s"]:
        return percent_text(ours["mfu"])
    return off_text(facts, facts.get("by_its_rule_s", ours["step_s"]))


def write_page(kept: dict[str, Any]) -> None:
    """Write it where the docs show it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(kept)}{END}{after}")
