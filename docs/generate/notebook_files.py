"""The notebooks with what they showed, to be looked at in a repository: `make notebook-files`.

Notebooks are text (`notebooks/*.py`, jupytext's percent format), and `make notebooks` runs them in
`build/notebooks`. This keeps what they showed there beside the text, as `notebooks/*.ipynb`. What
differs between two runs of the same code is taken out: ids of cells, times of cells, the kernel's
version, how its output came in parts, the state of widgets. So a new run changes measured figures
and nothing else. Notebooks that only plan do so for a device of the table, and have none.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "notebooks"
RUN = ROOT / "build" / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
"""A widget needs a running notebook; its text says what it is."""

Cell = dict[str, Any]


def normalised(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook that was run, without what another run of the same code would have otherwise."""
    cells: list[Cell] = []
    count = 0
    for number, cell in enumerate(notebook["cells"]):
        count += cell["cell_type"] == "code"
        cells.append(_cell(cell, f"cell-{number}", count))
    made_by = {"version": version("remat"), "torch": version("torch")}
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}, "remat": made_by}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _cell(cell: Cell, name: str, count: int) -> Cell:
    kept: Cell = {
        "cell_type": cell["cell_type"],
        "id": name,
        "metadata": {},
        "source": _lines(_text(cell["source"])),
    }
    if cell["cell_type"] == "code":
        kept |= {"execution_count": count, "outputs": _outputs(cell["outputs"], count)}
    return kept


def _outputs(outputs: list[Cell], count: int) -> list[Cell]:
    """Streams in one part, and no empty results, as those of tables that show themselves."""
    kept: list[Cell] = []
    for output in outputs:
        last = kept[-1] if kept else {}
        if output["output_type"] == "stream":
            text = _text(output["text"])
            if last.get("output_type") == "stream" and last["name"] == output["name"]:
                last["text"] = _lines(_text(last["text"]) + text)
            else:
                kept.append({**output, "text": _lines(text)})
        elif output["output_type"] == "error":
            kept.append(output)
        else:
            data = {kind: what for kind, what in output["data"].items() if kind != WIDGET}
            shown = {**output, "data": data}
            if "execution_count" in output:
                shown["execution_count"] = count
            kept += [shown] * any(map(_text, data.values()))
    return kept


def _text(source: str | list[str]) -> str:
    return "".join(source)


def _lines(text: str) -> list[str]:
    """As a notebook keeps a text, so that a difference is one of lines."""
    return text.splitlines(keepends=True)


def main() -> None:
    """Write what `make notebooks` ran beside the text of each."""
    for source in sorted(KEPT.glob("*.py")):
        ran = json.loads((RUN / f"{source.stem}.ipynb").read_text(encoding="utf-8"))
        text = json.dumps(normalised(ran), indent=1, ensure_ascii=False, sort_keys=True)
        source.with_suffix(".ipynb").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
