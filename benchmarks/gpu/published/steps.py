"""From a case to the ops of its step, and to a predicted time.

Traces take a minute for large models, so a folder may keep what they found.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import nn

from benchmarks.gpu.published.models import BUILDERS, autocast
from remat.graph_capture import trace
from remat.graph_capture.costs.cache import OpWork, work_of
from remat.graph_capture.costs.roofline import Roofline
from remat.graph_capture.joint.nodes import target_name

CASES_FILE = Path(__file__).with_name("cases.json")
_NUMBER_BYTES = 4  # of parameters, gradients and states, which optimizers keep in float32


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An update in float32: `passes` over each number of this rank, read or written, in `ops`
    kernels; once in `every` steps."""

    passes: int
    ops: int
    ranks: int = 1
    every: int = 1


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published time of a step, and how to build that step."""

    family: str
    side: Literal["fitted", "held out"]
    device: str
    published_ms: float
    source: str
    build: str
    sizes: dict[str, Any]
    autocast: str = ""
    optimizer: Optimizer | None = None
    recomputes: Literal["", "selective"] = ""
    attention: float = 1.0  # how many times as long as torch's its attention took


class Kernel(msgspec.Struct, frozen=True):
    """Equal ops of a step."""

    target: str
    work: OpWork
    times: float  # that it runs, recomputations included


class Step(msgspec.Struct, frozen=True):
    """All ops of a step, and how many numbers its parameters have, in how many tensors."""

    kernels: list[Kernel]
    parameters: int
    tensors: int


class Cases(msgspec.Struct, frozen=True):
    """What is compared, and how."""

    notes: list[str]
    cases: dict[str, Case]


def read_cases() -> Cases:
    """All of `cases.json`."""
    return msgspec.json.decode(CASES_FILE.read_bytes(), type=Cases)


def step_of(case: Case, folder: Path | None = None) -> Step:
    """The traced step, or what `folder` keeps of it."""
    if folder is None:
        return _traced(case)
    asked = json.dumps([case.build, case.sizes, case.autocast, case.recomputes])
    path = folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Step)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(found := _traced(case)))
    return found


def _traced(case: Case) -> Step:
    model, batch = BUILDERS[case.build](**case.sizes)
    with autocast(case.autocast):
        traced = trace(model, batch, device=case.device)
    counted: Counter[tuple[str, OpWork]] = Counter()
    products = 0
    for op in traced.graph.ops:
        if (node := traced.joint.node_of_op.get(op.name)) is None:
            continue
        kernel = target_name(node), work_of(node)
        counted[kernel] += 1
        if case.recomputes and op.phase == "forward" and ".blocks." in f".{op.module}.":
            products += (is_product := kernel[1].kind == "matmul")
            # As torchtitan: attention is kept, and every second product.
            if kernel[1].kind != "attention" and not (is_product and products % 2):
                counted[kernel] += 1
    kernels = [Kernel(target, work, times) for (target, work), times in counted.items()]
    return Step(kernels, *_sizes(model))


def _sizes(model: nn.Module) -> tuple[int, int]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return sum(sizes), len(sizes)


def kernels_of(case: Case, step: Step) -> Iterator[Kernel]:
    """All that the published time covers: the step's ops, and the update's, for its part."""
    for kernel in step.kernels:
        is_attention = kernel.work.kind.startswith("attention")
        times = kernel.times * (case.attention if is_attention else 1)
        yield msgspec.structs.replace(kernel, times=times)
    if (update := case.optimizer) is not None:
        moved_bytes = _NUMBER_BYTES * update.passes * step.parameters // update.ranks
        runs = update.ops * step.tensors
        work = OpWork(moved_bytes=moved_bytes // runs)
        yield Kernel("optimizer", work, runs / update.every)


def predicted_ms(case: Case, step: Step, roofline: Roofline) -> float:
    """As `remat` prices ops one after another."""
    return sum(k.times * roofline.cost_us(k.target, k.work) for k in kernels_of(case, step)) / 1e3
