"""Benchmarks: what solvers make of many graphs, and what plans make of real training steps.

Run as `python -m benchmarks.NAME`; each says more with `--help`:

- solvers: `solvers` (every solver on every graph), `solver_table` and `order_table` (the tables of
  docs/solvers.md), `graphs` and `layered` (the graphs),
  `narrow_solves` (narrow ones by CPU seconds), `instance` (one graph from a file),
  `references` (graphs whose optimum is known), `scaling` (cost of a plan against graph size);
- training steps: `training` (ours beside what others do; its parts are in `comparison/`),
  `examples`, `runtime`, `compiled_rewritten`, `torch_checkpoint`, `gpu_zoo`, `gpu/`;
- figures of the documents: `first_screen`, `gpu_page`, `tutorial`.

The rest serves these: `networks/`, `cell`, `instance_format`, `kept_memory`. Results that the
documents show are in `results/`.
"""
