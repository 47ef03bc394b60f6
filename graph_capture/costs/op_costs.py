"""From a trace to a graph with the costs of a device that is here."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from torch import fx

from remat.graph_capture.chunking.regions import (
    AND,
    ChunkCosts,
    RegionCandidate,
    find_regions,
    hoped,
    requested_regions,
    with_regions,
)
from remat.graph_capture.chunking.same_bits import kept_bits
from remat.graph_capture.costs.cache import (
    CostCache,
    OpCost,
    Profile,
    WholeStepTimes,
    costs_of_profile,
    moved_bytes,
    note_of,
)
from remat.graph_capture.costs.op_times import (
    KERNEL_ERRORS,
    KernelError,
    ProgressCallback,
    cost_key,
    runner_of,
    times_us,
    why_not_run,
)
from remat.graph_capture.costs.queue import in_a_queue, note_of_queue
from remat.graph_capture.costs.step_time import (
    STEP_NOT_TIMED,
    calibrated,
    is_beyond,
    step_rounds,
    whole_step,
)
from remat.graph_capture.devices.known_devices import CPU, allocator_rounding, is_cuda
from remat.graph_capture.devices.memory import is_out_of_memory
from remat.graph_capture.devices.memory_events import RegionMemory
from remat.graph_capture.devices.meter import Meter, Run
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.distributed.collectives import is_collective, run_locally
from remat.graph_capture.errors import CaptureError, option
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.build import SAVE_RNG, Joint
from remat.graph_capture.joint.gradients import with_update_costs
from remat.graph_capture.joint.nodes import fresh_storages, is_custom, target_name, tensors_of
from remat.graph_capture.tracing.fake_tensors import require_layout
from remat.graph_capture.tracing.traced_step import Trace
from remat.graph_capture.tracing.trials import numbers_of_users_kept

# The cost of each distinct op, measured by running it alone on made data.

ESTIMATED_BYTES_PER_US = 5_000  # a guess, for ops that do not run on made data
SAVE_RNG_KEY = "remat.save_rng_state()"  # stands for a `cost_key`, as this is no op of torch's


def time_ops(
    joint: Joint, missing: dict[str, fx.Node], meter: Meter, progress: ProgressCallback,
    between: Callable[[], None] | None, cache: CostCache,
) -> tuple[dict[str, OpCost], frozenset[str]]:  # fmt: skip
    """Costs of the `missing` ops and of saving a random state, and which ops had no room to run.
    `between` runs after each pass. `cache` keeps times for a process that is ended meanwhile."""
    meter.settle()
    cache.clocks = meter.clocks
    meter.rng_state()  # `median_us` takes what has run before
    saving = OpCost(meter.median_us(meter.rng_state), queue_us=meter.queue_us(meter.rng_state))
    op_costs, no_room = {SAVE_RNG_KEY: saving}, set[str]()

    def failed(key: str, error: KernelError) -> None:
        _refuse_broken_device(missing[key], error)
        if is_out_of_memory(error):
            no_room.add(key)
        op_costs[key] = _estimated(missing[key], error)

    # The first run also shows whether the trace has the strides that the kernel gives.
    def first(key: str, run: Run) -> None:
        node = missing[key]
        require_layout(node, run_locally(run), lambda: _place(joint, node))

    def after(done: int) -> None:
        if done % meter.passes == 0:
            progress(done // meter.passes, len(missing))

    progress(0, len(missing), text=f"timing {len(missing)} kinds of op")
    costs = times_us(
        {key: partial(runner_of, node, joint.module) for key, node in missing.items()},
        {key: moved_bytes(node) for key, node in missing.items()},
        meter, failed, first=first, after=after, between=between,
        begun=cache.begun, keep=cache.keep_begun,
    )  # fmt: skip
    with _said_if_short():  # memory comes last: what libraries take at first is then no op's
        memory = meter.regions(runner_of(missing[key], joint.module) for key in costs)
    for (key, (cost_us, away, queue_us)), found in zip(costs.items(), memory, strict=True):
        taken = _bytes_taken(missing[key], found, meter)
        op_costs[key] = OpCost(cost_us, *taken, away=away, queue_us=queue_us)
    return op_costs, frozenset(no_room)


@contextlib.contextmanager
def _said_if_short() -> Generator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CaptureError(
            "free some memory, or take a smaller batch: memory ran out while ops were measured.\n"
            f"Or plan with known costs ({option('profile')}, or a device of the table, "
            f"{option('device', 'h100')})"
        ) from error


def _refuse_broken_device(node: fx.Node, error: Exception) -> None:
    # After such an error the device runs no other op in this process.
    if "device-side assert" in str(error) or "illegal memory access" in str(error):
        raise CaptureError(
            "start Python again and plan for a model of the device by name, such as "
            f"{option('device', 'h100')}: {target_name(node)} cannot run on made data, and has "
            f"left the CUDA device unusable in this process ({str(error).splitlines()[0]})"
        ) from error


def _estimated(node: fx.Node, error: KernelError) -> OpCost:
    warnings.warn(
        f"{target_name(node)} {why_not_run(error, 'cannot be timed on made data')}; its cost is "
        "estimated from the bytes it moves, without workspace",
        stacklevel=2,
    )
    return OpCost(moved_bytes(node) / ESTIMATED_BYTES_PER_US, is_estimate=True)


def _bytes_taken(node: fx.Node, region: RegionMemory, meter: Meter) -> tuple[int, int]:
    """Its workspace, and what its results keep beyond their storages in the trace."""
    traced_bytes = sum(fresh_storages(node))
    workspace_bytes = max(0, region.peak_bytes - max(traced_bytes, region.final_bytes))
    kept_bytes = max(0, region.final_bytes - traced_bytes)
    return allocator_rounding(meter.device)(workspace_bytes), kept_bytes


def _place(joint: Joint, node: fx.Node) -> str:
    name = next(name for name, other in joint.node_of_op.items() if other is node)
    op = joint.graph.ops[joint.graph.op_index[name]]
    return " ".join(part for part in (op.module and f"of module {op.module}", op.source) if part)


@dataclass(frozen=True)
class _GraphCosts:
    of_key: Mapping[str, OpCost]  # by `cost_key`
    step: WholeStepTimes | None  # None where nobody ran it


def measure_costs(
    trace: Trace,
    *,
    progress: ProgressCallback | None = None,
    profile: Profile | None = None,
    measure_again: bool = False,
    most_bytes: int | None = None,
    chunks: bool = True,
) -> TrainingGraph:
    """The trace's graph with measured costs and workspaces: of a profile, else kept, else measured.

    The step is run as a whole too, for what it takes beyond its ops (`step_time.py`), unless that
    takes more than `most_bytes`, a budget. `progress` is called with (distinct ops timed, distinct
    ops to time), and with what is done. `measure_again`: what is on disk is measured anew. Without
    `chunks` no region is in chunks; `with_measured_chunks` adds them. ProfileError where `profile`
    is of another machine and lacks ops of the step."""
    meter, cache = _meter_and_cache(trace, measure_again)
    graph = measure_costs_with(trace, meter, cache, progress, profile, most_bytes)[0]
    if not chunks:
        return graph
    return with_measured_chunks(trace, graph, progress, measure_again=measure_again)


def _meter_and_cache(trace: Trace, measure_again: bool) -> tuple[Meter, CostCache]:
    meter = meter_of(trace.recipe.device)
    cache = CostCache.of(meter)
    if measure_again:
        cache.forget()
    return meter, cache


def with_measured_chunks(
    trace: Trace, graph: TrainingGraph, progress: ProgressCallback | None = None, *,
    measure_again: bool = False, found: Sequence[RegionCandidate] | None = None,
) -> TrainingGraph:  # fmt: skip
    """`graph`, and regions that may run in chunks, measured and compared for bits. `found`: these
    regions; None: those that the recipe asks for."""
    if not (found := requested_regions(trace) if found is None else found):
        return graph
    meter, cache = _meter_and_cache(trace, measure_again)
    with trace.python_state.streams_kept():
        in_chunks = _measured_chunks(meter, cache, progress or _silent)
        return with_regions(graph, found, in_chunks, kept_bits(meter, cache))


def with_optimistic_chunks(trace: Trace, graph: TrainingGraph) -> TrainingGraph:
    """`graph` with its costs, and regions that may run in chunks, as if they took no more time."""
    in_chunks = hoped(graph, allocator_rounding(graph.device))  # chunks do the captured ops' work
    return with_regions(graph, requested_regions(trace), in_chunks, lambda _: True)


def measure_costs_with(
    trace: Trace, meter: Meter, cache: CostCache, progress: ProgressCallback | None = None,
    profile: Profile | None = None, most_bytes: int | None = None,
) -> tuple[TrainingGraph, _GraphCosts]:  # fmt: skip
    """`measure_costs` by this `meter`, and the costs; what it measures is added to `cache`."""
    with contextlib.ExitStack() as stack:  # ops that draw, or count, do so when measured too
        stack.enter_context(trace.python_state.streams_kept())
        stack.enter_context(numbers_of_users_kept(trace.joint.module.graph))
        return _measured(trace, meter, cache, progress or _silent, profile, most_bytes)


def _measured(
    trace: Trace, meter: Meter, cache: CostCache, told: ProgressCallback, profile: Profile | None,
    most_bytes: int | None,
) -> tuple[TrainingGraph, _GraphCosts]:  # fmt: skip
    joint, graph = trace.joint, trace.graph
    keys, nodes = _keys_and_nodes(joint)
    known: Mapping[str, OpCost] = {} if profile is None else costs_of_profile(nodes, profile, meter)
    rounds = step_rounds(joint, graph, meter, cache, profile, most_bytes)
    between = rounds.some if rounds else None  # between passes: one slow spell meets both
    costs = _known_or_measured(joint, nodes, meter, cache, known, told, between)
    # These have no node, and so no key of their own.
    keys |= {op.name: SAVE_RNG_KEY for op in graph.ops if op.target == SAVE_RNG}
    of_op = {name: costs[key] for name, key in keys.items()}
    costed = replace(
        graph,
        ops=tuple(with_cost(op, of_op.get(op.name)) for op in graph.ops),
        values=_values_as_allocated(joint, of_op),
        resident=replace(graph.resident, libraries_bytes=meter.library_bytes()),
        cost_origin="measured",
        versions={
            **graph.versions,
            **meter.versions,
            **cache.clocks,
            "priced_on": profile.title if profile else meter.title,
        },
        notes=() if profile is None else (note_of(profile),),
    )
    queued = in_a_queue(costed, of_op) if is_cuda(graph.device) else None
    if rounds:
        told(text="timing whole steps")
    alone_us, costed = costed.time_us, queued.graph if queued else costed
    step = whole_step(joint, costed, cache, rounds, profile)
    if step is None and is_beyond(joint, graph, most_bytes):
        costed = replace(costed, notes=(*costed.notes, STEP_NOT_TIMED))
    if (taken := step or (queued and queued.step)) is not None:
        costed = calibrated(costed, taken)
    if queued and costed.time_us:
        said = note_of_queue(alone_us / costed.time_us, is_timed=step is not None)
        costed = replace(costed, notes=(*costed.notes, said))
    # After that too, as the step that is timed updates nothing.
    costed = with_update_costs(costed, joint, trace.recipe.gradient_release, "measured")
    if any(map(is_collective, joint.node_of_op.values())):
        from remat.graph_capture.distributed.collective_costs import (
            links_of_step,
            with_collective_costs,
        )

        # After that, as the step is run with the stand-ins of collectives, at what these take.
        links = links_of_step(trace.recipe.device, meter.title, profile)
        costed = with_collective_costs(costed, joint.node_of_op, links)
    return costed, _GraphCosts(costs, step)


def doubt_costs(trace: Trace) -> None:
    """Have the ops of a trace, and its whole step, measured again at the next quiet moment."""
    meter = meter_of(trace.recipe.device)
    CostCache.of(meter).doubt(examples(trace.joint), trace.joint.timed_hash)


def _measured_chunks(meter: Meter, cache: CostCache, told: ProgressCallback) -> ChunkCosts:
    def chunk_costs(found: RegionCandidate) -> tuple[Mapping[str, Op], tuple[Value, ...]]:
        own_nodes = [node for _, node in found.by_node()]
        keys = {node.name: cost_key(node) for node in own_nodes}
        nodes = {keys[node.name]: node for node in own_nodes}
        costs = _known_or_measured(found.joint, nodes, meter, cache, {}, told, None)
        of_op = {name: costs[key] for name, key in keys.items()}
        ops = {op.name: op for op in found.joint.graph.ops}
        own = {name: with_cost(ops[name], one) for name, one in of_op.items()}
        return own, _values_as_allocated(found.joint, of_op)

    return chunk_costs


def examples(joint: Joint) -> dict[str, fx.Node]:
    return _keys_and_nodes(joint)[1]


def _keys_and_nodes(joint: Joint) -> tuple[dict[str, str], dict[str, fx.Node]]:
    keys = {name: cost_key(node) for name, node in joint.node_of_op.items()}
    # Reversed, so that of equal keys the first node is the one that stays.
    return keys, {keys[name]: node for name, node in reversed(joint.node_of_op.items())}


def _known_or_measured(
    joint: Joint, nodes: dict[str, fx.Node], meter: Meter, cache: CostCache,
    known: Mapping[str, OpCost], progress: ProgressCallback, between: Callable[[], None] | None,
) -> dict[str, OpCost]:  # fmt: skip
    """Costs of `nodes` and of saving a random state: those `known`, else kept, else measured."""
    wanted = (*nodes, SAVE_RNG_KEY)
    missing = {key for key in wanted if key not in known} - cache.settled(wanted, meter)
    found: dict[str, OpCost] = {}
    if missing:
        new = {key: node for key, node in nodes.items() if key in missing}
        with meter.quiet():
            found, no_room = time_ops(joint, new, meter, progress, between, cache)
        # Another time there may be room to run it; and users edit the code of their ops.
        fleeting = no_room | {key for key, node in new.items() if is_custom(node)}
        cache.keep_costs({key: one for key, one in found.items() if key not in fleeting})
    every = {**found, **cache.costs, **known}  # another process's costs stay in place of these
    return {key: every[key] for key in wanted}


def _values_as_allocated(joint: Joint, costs: dict[str, OpCost]) -> tuple[Value, ...]:
    graph = joint.graph
    allocated = allocator_rounding(graph.device)
    # What a step on a CUDA device has on the host takes nothing on the device.
    host = _on_the_host(joint) if is_cuda(graph.device) else frozenset()
    # Some results are larger than a trace says: mse_loss returns a scalar in the storage of all its
    # terms. So the first result grows by what the op kept; for this a hash does not cover sizes.
    costed = (op for op in graph.ops if op.name in costs and op.outputs)
    kept = {op.outputs[0]: costs[op.name].kept_bytes for op in costed}

    def size_bytes(value: Value) -> int:
        return allocated(value.size_bytes + kept.get(value.name, 0))

    return tuple(
        replace(value, size_bytes=0 if value.name in host else size_bytes(value))
        for value in graph.values
    )


def _on_the_host(joint: Joint) -> frozenset[str]:
    bases = ((name, tensors_of(node)[0]) for name, node in joint.base_of_value.items())
    return frozenset(name for name, t in bases if t is not None and t.device.type == CPU)


def _silent(done: int = 0, total: int | None = None, *, text: str = "") -> None:
    pass


def with_cost(op: Op, cost: OpCost | None) -> Op:
    if cost is None:  # the arrival of tangents and new statistics are no ops of torch
        return op
    return replace(
        op,
        cost_us=cost.alone_us,
        cost_origin="estimated" if cost.is_estimate else "measured",
        workspace_bytes=op.workspace_bytes + cost.workspace_bytes,
    )


# What ops take in bytes, without their times: one run each.


def measured_workspaces(trace: Trace, names: Collection[str]) -> dict[str, int]:
    """Bytes beyond results, by op. Left out are ops that do not run on made data."""
    meter = meter_of(trace.recipe.device)
    nodes = {name: node for name in names if (node := trace.joint.node_of_op.get(name))}
    own = {op.name: op.workspace_bytes for op in trace.graph.ops}
    keys = {name: cost_key(node) for name, node in nodes.items()}
    distinct = {key: nodes[name] for name, key in keys.items()}
    with trace.python_state.streams_kept():
        regions = _regions(trace.joint, distinct, meter)
    found = {key: _bytes_taken(distinct[key], one, meter)[0] for key, one in regions.items()}
    return {name: own[name] + found[key] for name, key in keys.items() if key in found}


def measured_in_chunks(found: RegionCandidate) -> dict[str, int]:
    """`measured_workspaces` of the ops of ours in a region, in the chunks that it is set to."""
    nodes = {node.name: node for _, node in found.by_node()}
    meter = meter_of(str(found.parts[0].ends[0].meta["val"].device))
    regions, made = _regions(found.joint, nodes, meter), found.joint.graph
    own = {name: made.ops[made.op_index[name]].workspace_bytes for name in nodes}
    return {
        name: own[name] + _bytes_taken(nodes[name], one, meter)[0] for name, one in regions.items()
    }


class Sized:
    """A trace's graph with the bytes of its ops and no times, to judge a schedule at other sizes.
    Ops without known costs run once."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._meter = trace, meter_of(trace.recipe.device)
        self._cache = CostCache.of(self._meter)
        with trace.python_state.streams_kept():
            graph = self._of_ops(trace.joint)
        resident = replace(graph.resident, libraries_bytes=self._meter.library_bytes())
        self.graph = replace(graph, resident=resident)

    def with_region(self, region: str, chunks: int, *, is_exact: bool) -> TrainingGraph:
        """Without the region where the step has other parts, or where bits differ (`is_exact`)."""
        has_them = kept_bits(self._meter, self._cache)

        def of_chunks(found: RegionCandidate) -> tuple[dict[str, Op], tuple[Value, ...]]:
            graph = self._of_ops(found.joint)
            own = {node.name for _, node in found.by_node()}
            return {op.name: op for op in graph.ops if op.name in own}, graph.values

        with self._trace.python_state.streams_kept():
            return with_regions(
                self.graph, find_regions(self._trace, is_exact, region.split(AND)), of_chunks,
                lambda found: found.chunks == chunks and has_them(found),
            )  # fmt: skip

    def _of_ops(self, joint: Joint) -> TrainingGraph:
        keys, nodes = _keys_and_nodes(joint)
        known = self._cache.costs
        new = {key: node for key, node in nodes.items() if key not in known}
        regions = _regions(joint, new, self._meter)
        every = {key: known[key] for key in nodes if key in known}
        for key, one in regions.items():
            every[key] = OpCost(0.0, *_bytes_taken(new[key], one, self._meter))
        of_op = {name: every[key] for name, key in keys.items() if key in every}
        ops = (
            replace(op, workspace_bytes=op.workspace_bytes + one.workspace_bytes)
            if (one := of_op.get(op.name))
            else op
            for op in joint.graph.ops
        )
        return replace(joint.graph, ops=tuple(ops), values=_values_as_allocated(joint, of_op))


def _regions(joint: Joint, nodes: Mapping[str, fx.Node], meter: Meter) -> dict[str, RegionMemory]:
    if not nodes:
        return {}
    ran: list[str] = []
    with meter.quiet():
        regions = meter.regions(_warm(joint, nodes, ran))
    return dict(zip(ran, regions, strict=True))  # complete once the regions are measured


def _warm(joint: Joint, nodes: Mapping[str, fx.Node], ran: list[str]) -> Iterator[Run]:
    """Runs of ops that have run once; the keys of those that do run are added to `ran`."""
    for key, node in nodes.items():
        with contextlib.suppress(*KERNEL_ERRORS):
            run = runner_of(node, joint.module)
            run_locally(run)  # what libraries allocate at their first use is then no op's
            ran.append(key)
            yield run
