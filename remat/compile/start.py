"""One compilation of a graph: planned, or by the plan that an earlier process has kept.

A start is warm where a plan is kept under the graph's `start_key`. If torch has the code, it asks
for no plan; the kept one is noted for graphs that share the budget. Torch finds code by the plan's
name, drawn anew each time: code and plan cannot be mixed up.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, fx

from remat.caches.known_plans import ADDRESS, file_of, keeps_solves, sources_key, without_lines
from remat.compile.graph_context import ChosenPlan, CompileOptions, GraphContext
from remat.compile.plan_search import (
    CLOSE_ENOUGH,
    AgreedPlan,
    Candidate,
    PlanSearch,
    is_good_enough,
    plan_key,
    require_within,
)
from remat.compile.specialize import device_of_inputs
from remat.formats import budget_text, bytes_text
from remat.graph_capture.costs.cache import CostCache, OpCost
from remat.graph_capture.devices.known_devices import CPU, CUDA, is_cuda
from remat.graph_capture.devices.meter import cpu_title
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import BudgetError, PlanError
from remat.graph_capture.files import CacheFiles, decode_json
from remat.graph_capture.graph import MOST_BYTES, TrainingGraph
from remat.graph_capture.joint.nodes import storage_key
from remat.graph_capture.torch_private.aot import dynamo_config, functorch_config
from remat.graph_capture.torch_private.core import OpOverload, kernel_settings, pytree
from remat.graph_capture.torch_private.inductor import inductor_config
from remat.ranks.one_plan import is_alone, one_plan
from remat.rewriter.inductor.fused_nodes import module_and_line
from remat.rewriter.inductor.partition import FusedStep, Pair
from remat.rewriter.inductor.replay import ReplayedMemory, StepBytes
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of, simulate
from remat.solver.search import Clock

# A key of all that a compiled plan depends on, made of dynamo's graph before Inductor runs. Costs
# are not in it: they are kept with the plan, and compared.


def start_key(gm: fx.GraphModule, inputs: Sequence[Any], asked: CompileOptions, around: str) -> str:
    """SHA-256 of all that the plan of a graph depends on; empty where that has no lasting text."""
    digest = hashlib.sha256()
    surroundings = _surroundings(device_of_inputs(inputs))
    for part in (repr(asked), around, *surroundings, *_input_lines(inputs), *_graph_lines(gm)):
        if ADDRESS in part:  # an object's default text has its address
            return ""
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()


def _surroundings(device: str) -> Iterator[str]:
    meter = meter_of(device) if is_cuda(device) else None
    title = f"{meter.title} {meter.settings} {meter.versions}" if meter else ""
    yield f"{cpu_title()} {title}"
    yield f"{torch.__version__} {torch.version.git_version} {sources_key()}"
    yield f"{inductor_config.get_hash().hex()} {functorch_config.get_hash().hex()}"
    yield f"{torch.is_grad_enabled()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"{torch.get_default_dtype()} {kernel_settings()}"
    for kind in (CPU, CUDA):
        yield f"{torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    if dist.is_available() and dist.is_initialized():
        yield f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _input_lines(inputs: Sequence[Any]) -> Iterator[str]:
    """A line for each input, with the first input whose storage it shares."""
    storages: dict[int, int] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor):
            shared = storages.setdefault(storage_key(value), i)  # of one storage, bytes count once
            yield f"{_tensor_text(value)} in {shared}"
        else:
            yield repr(value)


def _tensor_text(tensor: Tensor) -> str:
    where = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else type(tensor).__name__
    return f"{kind} {tensor.dtype} {tensor.device} {tensor.requires_grad} {where}"


def _graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}  # names differ between runs
    for node in gm.graph.nodes:
        if node.op == "placeholder":  # inputs have lines of their own
            continue
        arguments = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        target = node.target if isinstance(node.target, str) else _name_of(node.target)
        yield f"{node.op} {target} {arguments} {module_and_line(node)[0]}"
        if node.op in ("get_attr", "call_module"):
            yield from _attribute_lines(gm, str(node.target))


def _attribute_lines(gm: fx.GraphModule, target: str) -> Iterator[str]:
    value: Any = functools.reduce(getattr, target.split("."), gm)
    if isinstance(value, fx.GraphModule):
        yield from _graph_lines(value)
    else:
        leaves = pytree.tree_leaves(value)
        yield " ".join(_tensor_text(t) if isinstance(t, Tensor) else repr(t) for t in leaves)


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{getattr(target, '__module__', '')}.{name}" if name else repr(target)


_NAME_BYTES = 16


def keeps_plans(asked: CompileOptions) -> bool:
    """Whether plans may be kept and taken; not where the user has torch keep nothing."""
    keeps_code = functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache
    # A bundle is kept by AOTAutograd whether or not Inductor keeps the code in it.
    is_bundled = functorch_config.bundled_autograd_cache or dynamo_config.caching_precompile
    # A plan that one rank has kept, and another has not, is no plan for all of them.
    return asked.warm and keeps_solves() and keeps_code and is_alone() and not is_bundled


class Start:
    """`name` is empty where nothing is kept."""

    def __init__(self, context: GraphContext, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.context, clock = context, Clock()
        self._key = ""
        if keeps_plans(context.asked):
            self._key = start_key(gm, inputs, context.asked, context.text())
        self._kept = kept_choice(self._key) if self._key else None
        if self._kept and not self._suits(self._kept):
            self._kept = None
        # Drawn anew for each plan, so that torch never gives out the code of another plan.
        drawn = secrets.token_hex(_NAME_BYTES) if self._key else ""
        self.name = self._kept.name if self._kept else drawn
        self._looked_s = clock.elapsed_s

    def plan(self, step: FusedStep) -> Pair:
        self.context.set_beside(step)
        kept = self._kept
        if kept and kept.graph == without_lines(step.graph):  # the key is of dynamo's graph alone
            self._note_kept(kept, step)
            return step.emit(kept.schedule) if kept.schedule else step.stock()
        if kept:
            self._kept, self.name = None, ""  # torch's own key has the old name in it
        return self._planned(step)

    def go_without_a_graph(self) -> None:
        """Torch asks for no plan where it has the code, or the graph has no gradients."""
        if self._kept and self._kept.graph:
            step = self._kept.step()
            self.context.set_beside(step)
            self._note_kept(self._kept, step)
        elif self._key and not self._kept:
            keep_choice(KeptChoice(self._key, self.name))  # so the next process asks for it

    def _suits(self, kept: KeptChoice) -> bool:
        """Whether a kept plan keeps to the budget as it is now, and is what would be chosen."""
        if kept.graph is None:
            return True
        step = kept.step()
        self.context.set_beside(step)
        beside = step.calls, step.modules, step.awaited_gradient_bytes
        # Its replayed peaks count what other calls leave.
        if beside != (kept.calls, kept.modules, kept.awaited_gradient_bytes):
            return False
        held_bytes = self.context.held_bytes(step)
        peak_bytes = held_bytes + kept.chosen.peak_bytes
        budgets_bytes = self.context.budgets_bytes(step, kept.stock)
        if self.context.asked.parsed.kind == "auto":
            # What is free is never the same twice.
            return peak_bytes <= budgets_bytes[0] and _is_near(kept, budgets_bytes[0], held_bytes)
        is_same = not budgets_bytes or kept.budget_bytes in budgets_bytes
        return is_same and peak_bytes <= kept.budget_bytes

    def _note_kept(self, kept: KeptChoice, step: StepBytes) -> None:
        self.context.warn_of_part()
        self.context.note(step, kept.taken(), kept.budget_bytes, self._looked_s)

    def _planned(self, step: FusedStep) -> Pair:
        clock = Clock()
        self.context.warn_of_part()
        search = PlanSearch(step, self.context.asked)
        stock = search.stock()
        budget_bytes, found = self._agreed(search, stock)
        figures = found.overhead, found.gap, 1 + len(search.tried)  # one more: that of `stock`
        taken = ChosenPlan(stock.replay, found.replay, found.schedule, *figures)
        self.context.note(step, taken, budget_bytes, self._looked_s + clock.elapsed_s)
        if self._key:
            self._keep(step, stock, found, budget_bytes)
        return found.pair

    def _keep(self, step: FusedStep, stock: Candidate, found: Candidate, budget_bytes: int) -> None:
        result = found.result
        keep_choice(
            KeptChoice(
                key=self._key, name=self.name or secrets.token_hex(_NAME_BYTES),
                graph=without_lines(step.graph), schedule=found.schedule,
                lower_bound_us=result.lower_bound_us if result and result.schedule else 0.0,
                stock=stock.replay, chosen=found.replay, static_bytes=step.static_bytes,
                dynamic_bytes=step.dynamic_bytes, gradient_bytes=step.gradient_bytes,
                calls=step.calls, modules=step.modules,
                awaited_gradient_bytes=step.awaited_gradient_bytes, budget_bytes=budget_bytes,
                costs=step.costs,
            )
        )  # fmt: skip

    def _agreed(self, search: PlanSearch, stock: Candidate) -> tuple[int, Candidate]:
        asked, step = self.context.asked, search.step
        with one_plan(plan_key(asked, [step])) as one:
            if one.is_made_here:
                budget_bytes, found = self._chosen(search, stock)
                one.post(AgreedPlan.of(budget_bytes, [found]))
                return budget_bytes, found
            choice = one.theirs(AgreedPlan)
            found = search.of(*choice.of_subgraph(0))
            budget_bytes, held_bytes = choice.budget_bytes, self.context.held_bytes(step)
            taken = budget_bytes, held_bytes + found.code_peak_bytes, held_bytes
            require_within(one, asked, self.context.shared.device, *taken)
            return budget_bytes, found

    def _chosen(self, search: PlanSearch, stock: Candidate) -> tuple[int, Candidate]:
        """The budget in bytes, and what fits it; `BudgetError` where nothing does."""
        step = search.step
        held_bytes = self.context.held_bytes(step)
        if not (budgets_bytes := self.context.budgets_bytes(step, stock.replay)):
            least = search.least() or stock
            return held_bytes + least.replay.peak_bytes, least
        for budget_bytes in budgets_bytes:
            if (found := search.within(budget_bytes - held_bytes, stock)) is not None:
                return budget_bytes, found
        raise BudgetError(_too_small(search, stock, budgets_bytes[-1], held_bytes))


def _is_near(kept: KeptChoice, budget_bytes: int, held_bytes: int) -> bool:
    """Whether a kept plan is what a search at another budget would be content with."""
    limit_bytes = budget_bytes - held_bytes
    is_enough = is_good_enough(kept.taken().overhead, kept.chosen.peak_bytes, limit_bytes)
    return is_enough or kept.budget_bytes >= CLOSE_ENOUGH * budget_bytes


def _too_small(search: PlanSearch, stock: Candidate, budget_bytes: int, held_bytes: int) -> str:
    candidates = [stock, *search.tried.values()]
    least = held_bytes + min(c.replay.peak_bytes for c in candidates)
    return (
        f'give options={{"budget": "{budget_text(least)}"}}, a smaller batch, "budget": "min", or '
        'a larger "replays" to search further.\n'
        f"The budget of {bytes_text(budget_bytes)} is below {bytes_text(least)}, the lowest peak "
        f"of {len(candidates)} compiled plans that were replayed; {bytes_text(held_bytes)} of it "
        "are parameters, buffers, inputs and what earlier graphs hold"
    )


# Plans of compiled steps on disk, a file for each `start_key`. None is believed
# (`graph_capture/files.py`): `simulate` judges its schedule, and costs must be those measured here.

_SCHEMA_VERSION = 1
CHOICES_FOLDER = "compiled"
MOST_FILES = 256  # of the folder; those that were not used for longest go first
MOST_ENTRY_BYTES = 1 << 24  # larger plans are made anew; 5,000 ops take 2 MB


class KeptChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for one graph of dynamo's, and all that must be known to take it again."""

    key: str
    name: str  # under which Inductor has cached the code
    graph: TrainingGraph | None = None  # None without gradients
    schedule: Schedule | None = None  # None too where the step is as torch compiles it
    lower_bound_us: float = 0.0
    stock: ReplayedMemory = ReplayedMemory(0, 0, 0)
    chosen: ReplayedMemory = ReplayedMemory(0, 0, 0)
    static_bytes: int = 0
    dynamic_bytes: int = 0
    gradient_bytes: int = 0
    calls: int = 1
    modules: int = 1
    awaited_gradient_bytes: int = 0
    budget_bytes: int = 0  # with parameters
    costs: dict[str, OpCost] = msgspec.field(default_factory=dict[str, OpCost], name="prices")
    schema_version: int = _SCHEMA_VERSION

    def taken(self) -> ChosenPlan:
        """Its figures, judged anew; raises `RematError` where the file cannot be true."""
        if self.schedule is None or self.graph is None:
            return ChosenPlan(self.stock, self.chosen)
        found = simulate(self.graph, self.schedule)
        if self.lower_bound_us > (1 + 1e-9) * found.time_us:  # no bound is above a reached time
            raise PlanError("its bound is above its time")
        gap = gap_of(found.time_us, self.lower_bound_us)
        gap = None if gap is None else max(0.0, gap)
        return ChosenPlan(self.stock, self.chosen, self.schedule, found.overhead, gap)

    def step(self) -> StepBytes:
        return StepBytes(self.static_bytes, self.dynamic_bytes, self.gradient_bytes)


def kept_choice(key: str) -> KeptChoice | None:
    """None where nothing is kept, or nothing that can be taken."""
    found = _files().read(file_of(key), _whole_choice)
    # The file's name has a part of the key only.
    if found is None or found.key != key or found.schema_version != _SCHEMA_VERSION:
        return None
    if not found.costs or found.graph is None:
        return found
    known = CostCache.of(meter_of(found.graph.device)).costs  # other costs might give another plan
    return found if all(known.get(key) == cost for key, cost in found.costs.items()) else None


def keep_choice(choice: KeptChoice) -> None:
    _files().write(file_of(choice.key), msgspec.json.encode(choice))


def _files() -> CacheFiles:
    return CacheFiles(
        "plans", "each process plans anew", CHOICES_FOLDER,
        most_files=MOST_FILES, most_bytes=MOST_ENTRY_BYTES,
    )  # fmt: skip


def _whole_choice(data: bytes) -> KeptChoice:
    """Raises `RematError` for what cannot be true."""
    found = decode_json(data, KeptChoice)
    sizes = [found.static_bytes, found.dynamic_bytes, found.gradient_bytes, found.budget_bytes]
    sizes += [found.awaited_gradient_bytes, found.calls, found.modules]
    sizes += [*dataclasses.astuple(found.stock), *dataclasses.astuple(found.chosen)]
    if not all(0 <= size < MOST_BYTES for size in sizes):
        raise PlanError("a size cannot be")
    found.taken()  # a damaged file is found here, where it can be told
    return found
