"""Private parts of Inductor. To import them takes seconds beyond those of `aot`."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import torch
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor import inductor_prims, ir, test_operators
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import wrapper as wrapper_lines
from torch._inductor.codegen.cpp import (
    CppKernel,
    CppKernelProxy,
    CppScheduling,
    KernelGroup,
    LoopNest,
    TilingSelect,
)
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import MemoryUsageType
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler, SchedulerNode
from torch._inductor.virtualized import V

# Inductor's own op to have a result stored. Left to itself, it makes a cheap result again in each
# reader: 4 bytes a random number, not 1 of its mask. A GPT's tight plan took 12.5 MB, not 8.5.
REALIZE = torch.ops._inductor_test.realize.default  # which `test_operators` registers
