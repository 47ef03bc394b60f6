"""Figures of a plan beside its peak and its time.

What a CUDA allocator reserves for it (docs/reserved.md), its chunks and copies, its buffers in one
arena, and whether checkpointing every n-th layer, as torch does it, would do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from remat.budgets import unmodified_step
from remat.formats import budget_text, bytes_text, fine_time_text, percent_text
from remat.graph_capture.devices.known_devices import (
    has_cuda_allocator,
    is_in_table,
    modelled_device,
)
from remat.graph_capture.devices.links import BYTES_PER_US_IN_GB_S
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.errors import BudgetError, DeviceError, LayoutError, ScheduleError, option
from remat.graph_capture.graph import LINK_NAMES, Op, PartKind, TrainingGraph
from remat.schedules.derived import choice_of, graph_of_schedule
from remat.schedules.layout import (
    CPU_ALIGNMENT_BYTES,
    Layout,
    alignment_on,
    buffers_of,
    check_layout,
)
from remat.schedules.outcome import Result
from remat.schedules.reserved import (
    DEFAULT,
    EXPANDABLE,
    EXPANDABLE_CONF,
    N_STEPS,
    Reserved,
    reserved_of,
    retries_within,
)
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solved import infeasible_text
from remat.solver.policies.template import module_blocks, nth_blocks, template_sequence
from remat.solver.problem import Problem
from remat.solver.recompute_summary import is_product
from remat.solver.reductions.updates import late_sequence
from remat.solver.state import schedule_of

if TYPE_CHECKING:
    from torch import nn

    from remat.rewriter.arena.arena import Arena


def predict_reserved(graph: TrainingGraph, plan: Result | Schedule | None = None) -> Reserved:
    """What torch's CUDA caching allocator takes from the device for three steps of a plan."""
    if not isinstance(graph, TrainingGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            "pass what remat.capture returned, and a result or its schedule: reserved bytes are "
            f"predicted of a graph, and this is {type(graph).__name__}"
        )
    if not has_cuda_allocator(graph.device):
        raise DeviceError(
            f"capture for a CUDA device, such as {option('device', 'h100')}: the graph is for "
            f"{graph.device}, and only CUDA devices have reserved bytes"
        )
    if plan is None:
        step = unmodified_step(graph)  # eager has sizes of its own, so another graph
        graph, plan = step.graph, step.result
    if isinstance(plan, Result) and plan.schedule is None:
        raise BudgetError(infeasible_text(plan))
    schedule = plan.schedule if isinstance(plan, Result) else plan
    assert schedule is not None
    return reserved_of(graph, schedule)


def reserved_beside(graph: TrainingGraph, result: Result) -> Reserved | None:
    """As a figure beside others; None where there is no such allocator, or no plan."""
    if result.schedule is None or not has_cuda_allocator(graph.device):
        return None
    return reserved_of(graph, result.schedule)


def shortage_text(graph: TrainingGraph, schedule: Schedule) -> str:
    """What becomes of a plan that would reserve more than a device of the table has; else empty."""
    if not is_in_table(graph.device):
        return ""
    device_bytes = modelled_device(graph.device).memory_bytes
    if reserved_of(graph, schedule).default.reserved_bytes <= device_bytes:
        return ""
    buffers = buffers_of(graph, schedule)
    retries = retries_within(buffers, DEFAULT, device_bytes)
    better = retries_within(buffers, EXPANDABLE, device_bytes)
    said = f"on the {bytes_text(device_bytes)} of {graph.device}, {_outcome_text(retries)}"
    # Expandable segments are named only where the replay says that they help.
    if better is None or (retries is not None and better >= retries):
        return f"take a smaller budget: {said}"
    said = f"start with {EXPANDABLE_CONF}: {said}"
    return f"{said}, and then {_outcome_text(better)}" if better else said


def _outcome_text(retries: int | None) -> str:
    if retries is None:
        return "a step runs out of memory"
    return f"the allocator frees and waits {retries} times in {N_STEPS} steps"


def reserved_text(plan: Reserved, without: Reserved | None = None) -> str:
    said = f"{bytes_text(plan.default.reserved_bytes)} predicted ({_expandable_text(plan)})"
    if without is None:
        return said
    unmodified_bytes = without.default.reserved_bytes
    return f"{said}, unmodified {bytes_text(unmodified_bytes)} ({_expandable_text(without)})"


_FUSED = 0.2  # of the step's time: below it, little is said by naming Inductor


def compiled_text(graph: TrainingGraph, budget: str) -> str:
    """What is known of the compiled step before it is compiled, and how to know more; or empty."""
    if not has_cuda_allocator(graph.device) or graph.time_us <= 0:
        return ""
    fused_us = sum(op.cost_us for op in graph.ops if not is_product(op.target))
    if (share := fused_us / graph.time_us) < _FUSED:
        return ""
    return (
        f"compare with compile=True: {percent_text(share)} of the step's time is in ops that "
        "Inductor may fuse, with gradients equal to eager's up to rounding. The line of "
        f'torch.compile(model, backend="remat", options={{"budget": "{budget}"}}) says whether '
        "torch's own compiled step fits, and takes it then"
    )


def _expandable_text(reserved: Reserved) -> str:
    return f"expandable {bytes_text(reserved.expandable.reserved_bytes)}"


class InChunks(msgspec.Struct, frozen=True):
    region: str
    module: str  # of its first op
    chunks: int = msgspec.field(name="pieces")  # the key of older releases
    exact: bool  # gives eager's bits
    whole_bytes: int  # the most that its ops hold of their own
    chunks_bytes: int = msgspec.field(name="pieces_bytes")
    extra: float  # time of each of its ops once, beyond the captured ones, as a part of the step
    kinds: tuple[PartKind, ...] = ("head",)

    @property
    def name(self) -> str:
        what = f"{self.module or self.region} and its loss"
        if "mlp" in self.kinds:
            what = "MLPs" if self.kinds == ("mlp",) else "MLPs, and heads with their losses,"
        return f"{what} in {self.chunks} chunks"

    def __str__(self) -> str:
        bits = "with eager's bits" if self.exact else "with sums in another order"
        before, now = bytes_text(self.whole_bytes), bytes_text(self.chunks_bytes)
        extra = percent_text(self.extra)
        return f"{self.name}, {bits}: {now} instead of {before}, for {extra} of the step"


def chunks_of(graph: TrainingGraph, schedule: Schedule | None) -> tuple[InChunks, ...]:
    """Each region that `schedule` runs in chunks; `graph` is the captured one."""
    if schedule is None or not graph.regions:
        return ()
    planned = graph_of_schedule(graph, schedule)
    regions = {region.name: region for region in graph.regions}
    found: list[InChunks] = []
    for one in schedule.chunks:
        names = set(regions[one.region].ops)
        whole = [op for op in graph.ops if op.name in names]
        ours = [op for _, op in choice_of(graph, one).ops]
        extra_us = sum(op.cost_us for op in ours) - sum(op.cost_us for op in whole)
        found.append(
            InChunks(
                one.region, whole[0].module, one.chunks, one.exact,
                _own_bytes(graph, whole), _own_bytes(planned, ours),
                extra_us / graph.time_us if graph.time_us else 0.0, regions[one.region].kinds,
            )
        )  # fmt: skip
    return tuple(found)


def _own_bytes(graph: TrainingGraph, ops: Sequence[Op]) -> int:
    size = {name: graph.value_by_name[name].size_bytes for op in ops for name in op.outputs}
    live = [sum(size.get(name, 0) for name in {*op.inputs, *op.outputs}) for op in ops]
    return max(op.workspace_bytes + own for op, own in zip(ops, live, strict=True))


SLOWER = 0.8
"""Share of the rates at which a plan is judged once more: links may fall beside other traffic."""
_WAYS = {"d2h": "to the host", "h2d": "back", "write": "to NVMe", "read": "back from NVMe"}


class _LinkUse(msgspec.Struct, frozen=True):
    link: str
    copies: int
    moved_bytes: int
    gb_s: float
    busy_us: float


class _Offloaded(msgspec.Struct, frozen=True):
    source: str  # of the rates, in words
    links: tuple[_LinkUse, ...]  # those that are used
    host_bytes: int  # the most that lies there at once
    host_room_bytes: int
    nvme_bytes: int
    nvme_room_bytes: int
    nvme_path: str
    stalls: int
    stall_us: float
    longest_us: float
    slower_us: float  # what the step takes more if links have `SLOWER` of their rates
    slower_overhead: float

    def rows(self) -> Iterator[tuple[str, str]]:
        room = f"{bytes_text(self.host_bytes)} of {bytes_text(self.host_room_bytes)}"
        if self.nvme_bytes:
            drive = f"{bytes_text(self.nvme_bytes)} of {bytes_text(self.nvme_room_bytes)}"
            room = f"{room}; NVMe {drive} in {self.nvme_path}"
        yield "host", room
        yield (
            "copies",
            "; ".join(
                f"{one.copies} {_WAYS[one.link]}, {bytes_text(one.moved_bytes)} in "
                f"{fine_time_text(one.busy_us)}"
                for one in self.links
            ),
        )
        all_us, longest_us = fine_time_text(self.stall_us), fine_time_text(self.longest_us)
        stalled = f"the device waits {all_us} for copies, {longest_us} at most at a time"
        yield "waits", stalled if self.stalls else "none: the device never waits for a copy"
        yield (
            "slower links",
            (
                f"at {SLOWER} of these rates a step takes {fine_time_text(self.slower_us)} longer, "
                f"{percent_text(self.slower_overhead)} overhead; peaks stay the same"
            ),
        )
        rates = ", ".join(f"{one.link} {one.gb_s:.3g} GB/s" for one in self.links)
        yield "links", f"{rates}: {self.source}"


def too_small_host(graph: TrainingGraph) -> str:
    """What host lets values reach NVMe, where some are too large to pass through this one.

    A copy takes room for the whole value, so twice the largest lets one come while another goes.
    """
    links = graph.links
    if links is None or not links.nvme_bytes:
        return ""
    late = {name for op in graph.ops if op.phase == "backward" for name in op.inputs}
    early = {name for op in graph.ops if op.phase == "forward" for name in op.outputs}
    sizes = [graph.value_by_name[name].size_bytes for name in sorted(early & late)]
    too_large = [size for size in sizes if size > links.host_bytes]
    if not too_large:
        return ""
    return (
        f"give {option('host', budget_text(2 * max(sizes)))}: on its way to NVMe a value is on the "
        f"host as a whole, and {len(too_large)} of {len(sizes)} are larger than it"
    )


def offloaded(
    graph: TrainingGraph, schedule: Schedule | None, found: Simulation | None = None
) -> _Offloaded | None:
    """None where `schedule` moves nothing. `found` is its simulation, if at hand."""
    if schedule is None or not schedule.moves or graph.links is None:
        return None
    graph = graph_of_schedule(graph, schedule)
    links = graph.links
    assert links is not None
    here = found or simulate(graph, schedule)
    slower = simulate(graph, schedule, links.slower(SLOWER))  # links have other traffic too
    return _Offloaded(
        source=links.source or "not said", links=_uses(here, graph),
        host_bytes=here.host_peak_bytes, host_room_bytes=links.host_bytes,
        nvme_bytes=here.nvme_peak_bytes, nvme_room_bytes=links.nvme_bytes,
        nvme_path=links.nvme_path, stalls=len(here.stalls), stall_us=here.stall_us,
        longest_us=max((stall.us for stall in here.stalls), default=0.0),
        slower_us=slower.time_us - here.time_us, slower_overhead=slower.overhead,
    )  # fmt: skip


def _uses(found: Simulation, graph: TrainingGraph) -> tuple[_LinkUse, ...]:
    uses: list[_LinkUse] = []
    for name in LINK_NAMES:
        link = graph.links and graph.links.link(name)
        copies = [copy for copy in found.copies if copy.link == name]
        if link is not None and copies:
            moved_bytes = sum(copy.size_bytes for copy in copies)
            gb_s = link.bytes_per_us / BYTES_PER_US_IN_GB_S
            uses.append(_LinkUse(name, len(copies), moved_bytes, gb_s, found.busy_us[name]))
    return tuple(uses)


# Checkpointing every n-th layer.

SAME_SPEED = 0.01  # how much slower than the plan, as a fraction, still counts as the same


class EveryNth(msgspec.Struct, frozen=True):
    """Checkpointing layers 0, n, 2n, … of each list of layers, and keeping the others."""

    n: int  # 1 checkpoints every layer
    layers: tuple[str, ...]  # module paths to wrap in `torch.utils.checkpoint.checkpoint`
    containers: tuple[str, ...]  # the lists that they are entries of
    peak_bytes: int
    time_us: float
    overhead: float
    slower: float  # than the plan, as a fraction; below 0 where it is faster

    @property
    def which(self) -> str:
        return "every layer" if self.n == 1 else f"every {_ordinal(self.n)} layer"

    @property
    def where(self) -> str:
        return ", ".join(f"{name}.*" for name in self.containers)

    def __str__(self) -> str:
        return (
            f"checkpointing {self.which} of {self.where} comes within 1 % of this plan: "
            f"{percent_text(self.overhead)} overhead, peak {bytes_text(self.peak_bytes)}"
        )


def every_n_layers(graph: TrainingGraph, result: Result) -> EveryNth | None:
    """The fastest way to checkpoint every n-th layer, if it is within 1 % of the result's time."""
    if result.schedule is None or result.time_us <= graph.time_us:
        return None
    best = fastest_nth(candidates(graph, result.time_us), result.budget_bytes)
    return best if best and best.slower <= SAME_SPEED else None


def fastest_nth(found: Iterable[EveryNth], budget_bytes: int) -> EveryNth | None:
    fitting = (one for one in found if one.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda one: (one.time_us, one.peak_bytes), default=None)


def candidates(graph: TrainingGraph, plan_us: float) -> Iterator[EveryNth]:
    """Each n that checkpoints fewer layers than the n before, compared with a plan of `plan_us`."""
    eager = with_eager_sizes(graph)  # such a model runs its ops as eager does
    problem, blocks = Problem.of(eager), module_blocks(eager)
    fewest = len(blocks.names) + 1
    for n in range(1, max(blocks.rank, default=-1) + 2):  # the largest takes only each list's first
        ranked = zip(blocks.names, blocks.rank, strict=True)
        layers = tuple(name for name, rank in ranked if rank % n == 0)
        if len(layers) == fewest:
            continue
        fewest = len(layers)
        runs = template_sequence(problem, nth_blocks(problem, blocks, n))
        sequence = late_sequence(problem, runs)  # a layer may read what another one trains
        found = simulate(eager, schedule_of(problem, sequence))
        containers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in layers))
        slower = found.time_us / plan_us - 1
        figures = found.peak_bytes, found.time_us, found.overhead, slower
        yield EveryNth(n, layers, containers, *figures)


def _ordinal(n: int) -> str:
    # 11th, 12th and 13th are the exceptions.
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


# Where the buffers of a planned step lie in one arena.


def place(
    graph: TrainingGraph, schedule: Schedule, *, alignment_bytes: int | None = None
) -> Layout:
    from remat.solver.layout.placing import place_buffers

    buffers = buffers_of(graph, schedule)  # first: it refuses what is no graph
    alignment_bytes = alignment_on(graph.device) if alignment_bytes is None else alignment_bytes
    return place_buffers(buffers, alignment_bytes=alignment_bytes)


def check_kept_layout(layout: Layout, graph: TrainingGraph, schedule: Schedule, name: str) -> None:
    """Hold a layout to its plan; `LayoutError`, with the file's name, if it is another's."""
    try:
        check_layout(buffers_of(graph, schedule), layout)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def layout_json(layout: Layout) -> dict[str, Any]:
    """What is said of a layout with `--json`: all but its offsets."""
    names = ("arena_bytes", "load_bytes", "gap", "alignment_bytes", "placed_by")
    return {name: getattr(layout, name) for name in names}


def arena_text(layout: Layout) -> str:
    return f"{bytes_text(layout.arena_bytes)}, {percent_text(layout.gap)} above the most live bytes"


def use_arena(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
    loss_fn: Callable[..., Any] | None = None, target: Any = None,
) -> Arena:  # fmt: skip
    from remat.rewriter.arena.arena import Arena, record_step, require_arena_fits
    from remat.rewriter.arena.library import arena_library
    from remat.solver.layout.placing import place_buffers

    rewritten = require_arena_fits(module)
    arena_library()  # compiled before a step runs, as there may be no compiler
    requests = record_step(rewritten, args, kwargs, loss_fn, target)
    layout = place_buffers(requests.buffers, alignment_bytes=CPU_ALIGNMENT_BYTES)
    return Arena(rewritten._remat_compiled_step.memory, requests, layout)
