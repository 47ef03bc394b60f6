"""What docs and README say of a GPU: `python -m benchmarks.gpu page`.

It reads `rows.jsonl` and what earlier visits left in `results/gpu`, and writes what they hold
between the marks of the pages. A part without rows is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ERROR, Row, RowFile
from benchmarks.solver_table import head, replaced, row

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "models.md"
README = ROOT / "README.md"
MARKER = "gpu"
MIB, GIB = 1 << 20, 1 << 30
BUDGETS = ("%", "min")
SHOWN = ("unmodified", "every block checkpointed", "plan 60%")
"""Variants that the README sets side by side."""

Kept = dict[str, Any]


def is_plan(name: str) -> bool:
    """Whether a row is of a plan, which is named by its budget."""
    return name.endswith(BUDGETS)


def made_on(parts: Iterable[Kept]) -> str:
    """The devices, versions and dates of all parts."""
    devices = dict.fromkeys(
        f"{one['device']}, " + ", ".join(f"{k} {v}" for k, v in one["versions"].items())
        for one in parts
    )
    dates = sorted({one["date"] for one in parts})
    return f"{'; '.join(devices)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."


def small_models(kept: Kept) -> list[str]:
    """One sentence on all of them."""
    found = kept["models"].values()
    off = [abs(one["plan"]["predicted_peak_bytes"] / one["plan"]["measured_peak_bytes"] - 1)
           for one in found]  # fmt: skip
    slower = [one["plan"]["measured_step_us"] / one["plan"]["predicted_step_us"] for one in found]
    equal, total = (sum(one[name] for one in found) for name in ("gradients_equal", "gradients"))
    return [
        f"{len(found)} small models at their least budget: {equal} of {total} gradients had "
        f"eager's bits, peaks were as predicted within {100 * max(off):.2f} %, {off.count(0.0)} to "
        f"the byte. Such steps wait for the host: they took {min(slower):.1f} to "
        f"{max(slower):.1f} times their costs.",
        "",
    ]


def steps(kept: Kept) -> list[str]:
    """Models of published sizes: predicted, measured."""
    titles = ["step under bfloat16 autocast", "peak, MiB", "reserved, MiB", "ms"]
    lines: list[str] = []
    for name, model in kept["models"].items():
        for step, one in model["rows"].items():
            title = f"{name}, {f'plan for {step}' if is_plan(step) else step}"
            lines.append(row([title, *_figures(one)]))
    return [*head(titles), *lines, ""]


def _figures(one: Kept) -> list[str]:
    if "peak_bytes" not in one:
        fits_not = one.get("status") == "infeasible" or "out_of_memory" in one
        other = "none found" if one.get("status") == "none found" else "failed"
        return ["does not fit" if fits_not else other, "-", "-"]
    return [
        _pair(one, "peak_bytes", lambda size: f"{size / MIB:,.0f}"),
        _pair(one, "reserved_bytes", lambda size: f"{size / MIB:,.0f}"),
        _pair(one, "step_us", lambda time_us: f"{time_us / 1e3:.1f}"),
    ]


def _pair(one: Kept, name: str, text: Callable[[float], str]) -> str:
    predicted = one.get(f"predicted_{name}")
    return f"{'-' if predicted is None else text(predicted)}, {text(one[name])}"


def compiled(kept: Kept) -> list[str]:
    """`torch.compile(backend="remat")` beside torch's own compiler."""
    titles = ["compiled step", "peak, MiB", "reserved, MiB", "ms", "gradients off by"]
    lines: list[str] = []
    for name, rows in kept["models"].items():
        for step, one in rows.items():
            title = f"{name}, {f'plan for {step}' if is_plan(step) else step}"
            error = one.get("gradients_off_by")
            off = "-" if error is None else f"{100 * error:.1f} %"
            lines.append(row([title, *_figures(one), off]))
    return [*head(titles), *lines, ""]


def links(kept: Kept) -> list[str]:
    """Rates of copies of the largest size, and what they cost beside products."""
    largest = max(kept["copies"], key=lambda one: one["bytes"])
    named = {
        "to the host": "d2h_us", "back": "h2d_us", "to the host, both busy": "both_d2h_us",
        "back, both busy": "both_h2d_us", "to pageable memory": "pageable_d2h_us",
    }  # fmt: skip
    rates = [f"{largest['bytes'] / 1e3 / largest[name]:.1f}" for name in named.values()]
    products = kept["products"]
    times = sorted(products[f"beside_{way}_ms"] / products["alone_ms"] for way in ("d2h", "h2d"))
    slower = " to ".join(dict.fromkeys(f"{100 * (time - 1):.0f}" for time in times))
    titles = [f"copies of {largest['bytes'] // MIB} MiB", *named, "products beside them"]
    return [*head(titles), row(["GB/s", *rates, f"{slower} % slower"]), ""]


Rows = Mapping[str, Row]


def table(rows: Rows) -> list[str]:
    """Models as they are, by what people do today, and by plans."""
    titles = ["step under bfloat16 autocast", "peak, MiB", "reserved, MiB", "ms", "unmodified, ms"]
    return _table([*titles, "gradients equal"], rows, _turn, _equal)


def compiled_rows(rows: Rows) -> list[str]:
    """Compiled steps."""
    titles = ["compiled step", "peak, MiB", "reserved, MiB", "ms", "eager, ms"]
    return _table([*titles, "gradients off by"], rows, _turn, _off)


def levers(rows: Rows) -> list[str]:
    """What was shown of each lever."""
    titles = ["lever, of a small model", "peak, MiB", "gradients equal"]
    lines = [row([name, _peak(one), _equal(one)]) for name, one in rows.items()]
    return [*head(titles), *lines, ""]


def ceilings(rows: Rows) -> list[str]:
    """What the device reaches, and its links."""
    lines: list[str] = []
    if "tflop_s" in (one := rows.get("product", {})):
        title = f"a bfloat16 product of width {one['width']:,}"
        lines.append(row([title, f"{one['tflop_s']:.0f} TFLOP/s"]))
    if "gb_s" in (one := rows.get("copy", {})):
        lines.append(row(["a copy, read and written", f"{one['gb_s'] / 1e3:.2f} TB/s"]))
    found = [*head(["ceiling", "reached"]), *lines, ""] if lines else []
    return [*found, *(links(rows["links"]) if rows.get("links", {}).get("copies") else [])]


def demo(rows: Rows) -> list[str]:
    """A model that is too large as it is."""
    titles = ["Llama 1B, 16 x 2,048 tokens, of 80 GiB", "peak, MiB", "reserved, MiB", "ms"]
    return _table([*titles, "gradients equal"], rows, _equal)


def _table(titles: list[str], rows: Rows, *more: Callable[[Row], str]) -> list[str]:
    lines = [
        row([name.replace("/", ", "), *_figures(one), *(text(one) for text in more)])
        for name, one in rows.items()
    ]
    return [*head(titles), *lines, ""]


def _turn(one: Row) -> str:
    return f"{one['eager_us'] / 1e3:.1f}" if "eager_us" in one else "-"


def _equal(one: Row) -> str:
    return f"{one['gradients_equal']} of {one['gradients']}" if "gradients" in one else "-"


def _off(one: Row) -> str:
    return f"{100 * one['gradients_off_by']:.1f} %" if "gradients_off_by" in one else "-"


def _peak(one: Row) -> str:
    if ERROR in one:
        return "failed"
    return _pair(one, "peak_bytes", _mib) if "peak_bytes" in one else "-"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.0f}"


PARTS: dict[str, Callable[[Kept], list[str]]] = {
    "small_models": small_models, "steps": steps, "compiled": compiled, "links": links,
}  # fmt: skip
"""What is made of each file of the first visits."""
OF_ROWS: dict[str, Callable[[Rows], list[str]]] = {
    "ceilings": ceilings, "table": table, "demo": demo, "compiled": compiled_rows,
    "levers": levers,
}  # fmt: skip
"""What is made of rows whose keys begin so."""


def lines_of(folder: Path = RESULTS) -> list[str]:
    """The part of the page, from the files of the folder."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    kept = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    found = _by_part(folder)
    visits = [one for one in found.get("visit", {}).values() if ERROR not in one]
    parts = [line for name, one in kept.items() for line in PARTS[name](one)]
    parts += [line for name in OF_ROWS if name in found for line in OF_ROWS[name](found[name])]
    return [f"{made_on([*kept.values(), *visits])} Predicted, measured:", "", *parts][:-1]


def _by_part(folder: Path) -> dict[str, Rows]:
    found: dict[str, dict[str, Row]] = {}
    for key, one in RowFile(folder / "rows.jsonl").read().items():
        part, _, name = key.partition("/")
        found.setdefault(part, {})[name] = one
    return found


def readme_lines(folder: Path = RESULTS) -> list[str]:
    """Models of which all that is shown was measured: peak and time of each."""
    found = _by_part(folder)
    rows, visits = found.get("table", {}), found.get("visit", {})
    models = dict.fromkeys(key.partition("/")[0] for key in rows)
    lines: list[str] = []
    for model in models:
        shown = [rows.get(f"{model}/{name}", {}) for name in SHOWN]
        if all("step_us" in one for one in shown):
            lines.append(row([model, *(_short(one) for one in shown)]))
    if not lines:
        return []
    device = next((one["device"] for one in visits.values() if "device" in one), "GPU")
    return [*head([device, *SHOWN]), *lines]


def _short(one: Row) -> str:
    return f"{one['peak_bytes'] / GIB:.1f} GiB, {one['step_us'] / 1e3:.0f} ms"


def write() -> None:
    """Write both pages anew."""
    for path, lines in ((PAGE, lines_of()), (README, readme_lines())):
        path.write_text(replaced(path.read_text(), MARKER, lines))
