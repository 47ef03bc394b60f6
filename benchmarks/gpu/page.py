"""What docs/models.md says of a CUDA device: `python -m benchmarks.gpu_page`.

It reads the files that `benchmarks/gpu_run.sh` and earlier visits left in `results/gpu`, and writes
what they hold between the marks of the page. A part without its file is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.solver_table import head, replaced, row

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "models.md"
MARKER = "gpu"
MIB = 1 << 20
BUDGETS = ("%", "min")

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
        return ["does not fit" if one.get("status") == "infeasible" else "failed", "-", "-"]
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


def copies(kept: Kept) -> list[str]:
    """Plans that copy values to the host."""
    titles = [
        "step, with kernels that repeat their bits", "peak, MiB", "reserved, MiB", "ms",
        "copied out, MiB", "gradients equal",
    ]  # fmt: skip
    lines: list[str] = []
    for name, budgets in kept["models"].items():
        for budget, rows in budgets.items():
            for way, one in rows.items():
                known = "gradients" in one
                equal = f"{one['gradients_equal']} of {one['gradients']}" if known else "-"
                last = [f"{one['copied_bytes'] / MIB:,.0f}" if known else "-", equal]
                title = f"{name}, {way if way == 'unmodified' else f'{budget}, {way}'}"
                lines.append(row([title, *_figures(one), *last]))
    return [*head(titles), *lines, ""]


PARTS: dict[str, Callable[[Kept], list[str]]] = {
    "small_models": small_models, "steps": steps, "compiled": compiled, "links": links,
    "copies": copies,
}  # fmt: skip
"""What is made of each file."""


def lines_of(folder: Path = RESULTS) -> list[str]:
    """The part of the page, from the files of the folder."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    kept = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    parts = [line for name, one in kept.items() for line in PARTS[name](one)]
    return [f"{made_on(kept.values())} Predicted, measured:", "", *parts][:-1]


def written_into(text: str) -> str:
    """The page with this part."""
    return replaced(text, MARKER, lines_of())


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(written_into(PAGE.read_text()))


if __name__ == "__main__":
    main()
