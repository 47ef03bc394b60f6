"""Plans for the shapes of published tables, and the page that sets both side by side.

    python -m benchmarks.papers [JOB ...] [--references FOLDER] [--time-limit S]
    python -m benchmarks.papers --page      # docs/systems.md, from the kept results

Nothing is run: costs are those of modelled devices, or of a published graph. A line is kept as
soon as it is solved. `--references` is the folder of published graphs, as
`benchmarks.cells.references` reads it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.papers.published import JOBS
from benchmarks.papers.rebuilt import Line, lines_of
from benchmarks.papers.systems import PAGE, kept_lines, text_of, write_lines
from remat.formats import percent_text

TIME_LIMIT_S = 300.0


def main(argv: list[str]) -> None:
    """Solve for the named jobs, and write the page."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.papers", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    known = [job.name for job in JOBS]
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(known))
    parser.add_argument("--references", type=Path)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds a solve")
    parser.add_argument("--page", action="store_true", help="only write the page")
    asked = parser.parse_args(argv)
    unknown = sorted(set(asked.jobs) - set(known))
    if unknown:
        parser.error(f"no job {', '.join(unknown)}: choose of {', '.join(known)}")
    for job in [] if asked.page else JOBS:
        if asked.jobs and job.name not in asked.jobs:
            continue
        for line in lines_of(job, asked.references, asked.time_limit):
            ours = "nothing fits" if line.overhead is None else percent_text(line.overhead)
            print(f"{line.name}: published {percent_text(line.published)}, ours {ours}", flush=True)
            others = [one for one in kept_lines() if (one.name, one.budget_bytes) != key(line)]
            write_lines([*others, line])
    PAGE.write_text(text_of(kept_lines()))


def key(line: Line) -> tuple[str, int]:
    """What a line replaces where it was solved before."""
    return line.name, line.budget_bytes


if __name__ == "__main__":
    main(sys.argv[1:])
