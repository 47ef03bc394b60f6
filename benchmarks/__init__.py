"""Benchmarks: what solvers make of many graphs, and what plans make of real training steps.

Run as `python -m benchmarks.NAME`; each says more with `--help`:

- solvers: `solvers` (every solver on every graph), `solver_table` and `cells.order_table` (the
  tables of docs/solvers.md), `graphs` and `layered` (the graphs), `narrow.solves` (narrow ones by
  CPU seconds), `instance` (one graph from a file), `cells.references` (graphs whose optimum is
  known), `scaling` (cost of a plan against graph size);
- training steps: `training` (ours beside what others do; its parts are in `comparison/`),
  `examples`, `runtime`, `running/`, `compiled/`, `gpu` (all that is measured on a lent GPU);
- figures of the documents: `first_screen`, `gpu page`, `tutorial`.

The rest serves these: `networks/`, `cells/`. Results that the documents show are in `results/`.
"""

GAP_OF_FIGURES = 1e-3
"""The gap of the solves behind figures that documents quote: tighter than the default."""
