"""What every row imports and probes for when it compiles: done once, before rows are forked."""

from __future__ import annotations

from importlib import import_module

from torch._inductor.cpu_vec_isa import pick_vec_isa

for name in (
    "benchmarks.comparison.row", "benchmarks.comparison.batches",
    "remat.one_call", "remat.compile.backend",
    "sympy.combinatorics", "sympy.physics.units", "torch._dynamo.convert_frame",
    "torch._inductor.codegen.cpp", "torch._inductor.compile_fx",
):  # fmt: skip
    import_module(name)
pick_vec_isa()
