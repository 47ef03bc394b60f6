"""Fixed rules of recomputation: from which ops run again to a schedule and a Result.

A template says what forward keeps for backward, which makes the rest again, once, by connected
segments: each when backward first reads of it, with all that backward reads. `StoreAll` makes
nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem
from remat.solver.result import evaluate_schedule
from remat.solver.search import Listener, Search
from remat.solver.state import mark_made, recomputed_in, store_all_state


@dataclass(frozen=True, slots=True)
class Template:
    """What backward finds as forward made it; the rest of forward runs again."""

    kept: bytearray  # 1 for values that backward finds, 0 for those it makes
    just_in_time: bool = False  # backward makes again only what it reads next, not a whole segment


_Templates = Callable[[Problem], Iterable[Template]]


def solve_templates(search: Search, templates: _Templates, absent: str) -> Result:
    """The fastest of `templates` that fits; `absent` is the message where there are none."""
    with search.until_interrupted():
        if search.offer_sequence(range(search.problem.n_ops), or_least=True):
            return search.result()
        search.message = absent
        for template in templates(search.problem):
            search.message = ""
            search.offer_sequence(template_sequence(search.problem, template), or_least=True)
            search.say("the next setting of the template")
            if search.out_of_time():
                break
    return search.result()


def template_sequence(problem: Problem, template: Template) -> list[int]:
    available = bytearray(template.kept)
    segments = _Segments(problem, template.kept)
    sequence = list(range(problem.n_forward))
    for t in range(problem.n_forward, problem.n_ops + 1):
        if gone := [v for v in problem.needs[t] if not available[v]]:
            wanted = gone if template.just_in_time else segments.read_with(gone)
            order = recomputed_in(problem, available, wanted, t, own_needs=False)
            order = order if template.just_in_time else sorted(order)  # as forward ran it
            sequence += order
            mark_made(problem, available, order)
        if t < problem.n_ops:
            sequence.append(t)
            mark_made(problem, available, (t,))
    return sequence


def regions(problem: Problem, again: Sequence[bool], region: Sequence[int]) -> Template:
    """The template that runs ops `again`, each in the `region` of a checkpoint call."""
    kept = unavoidable(problem)
    for v, op in enumerate(problem.producer):
        if op < problem.n_forward and not again[op]:
            kept[v] = 1
    for op in range(problem.n_forward):
        for v in problem.inputs[op]:
            if region[problem.producer[v]] != region[op]:  # a checkpoint keeps its inputs
                kept[v] = 1
    return Template(kept)


def unavoidable(problem: Problem) -> bytearray:
    """1 for values of forward that cannot be made again, or that the caller holds."""
    pinned, held = problem.no_recompute, problem.held
    made = enumerate(problem.producer)
    return bytearray(op < problem.n_forward and (pinned[op] or v in held) for v, op in made)


def read_in_backward(problem: Problem) -> list[int]:
    """Values of forward that backward reads, or that must be live at the end."""
    read = dict.fromkeys(v for values in problem.needs[problem.n_forward :] for v in values)
    return [v for v in read if problem.producer[v] < problem.n_forward]


class _Segments:
    """Connected parts of what runs again, and what backward reads of each."""

    def __init__(self, problem: Problem, kept: bytearray) -> None:
        self.producer = problem.producer
        self.parent = list(range(problem.n_ops))
        for op in range(problem.n_forward):
            if not all(kept[v] for v in problem.outputs[op]):
                for v in problem.inputs[op]:
                    if not kept[v]:
                        self.parent[self.root(op)] = self.root(problem.producer[v])
        self.read: dict[int, list[int]] = {}
        for v in read_in_backward(problem):
            if not kept[v]:
                self.read.setdefault(self.root(problem.producer[v]), []).append(v)

    def root(self, op: int) -> int:
        while self.parent[op] != op:
            self.parent[op] = self.parent[self.parent[op]]  # path halving, for long chains
            op = self.parent[op]
        return op

    def read_with(self, values: Iterable[int]) -> list[int]:
        reached = dict.fromkeys(self.root(self.producer[v]) for v in values)
        return [v for root in reached for v in self.read[root]]


def check_choice(option: str, found: str, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise SolverError(f"{option} must be one of {', '.join(allowed)}, not '{found}'")


# Blocks from module paths, since people wrap modules. (`hierarchical` goes by structure: a graph
# need not have names.) A block is an entry of an outermost container, as ``blocks`` in
# ``blocks.0.attn``, with two entries in use: a `Sequential` inside makes none, ``down.0`` and
# ``up.0`` both count. An op without a module takes the block before it if one follows.

NO_BLOCK = -1
NO_REPEATED_BLOCK = (
    "no repeated block: the template does not apply. A block is a numbered entry of a module "
    "list, such as blocks.0"
)


class Blocks(NamedTuple):
    """The blocks of a graph, in order of their first op."""

    of_op: list[int]  # `NO_BLOCK` outside
    names: list[str]
    container: list[int]  # its number
    rank: list[int]  # among the blocks of its container, from 0


def module_blocks(graph: TrainingGraph) -> Blocks:
    """`names` is empty where nothing repeats."""
    modules = [op.module for op in graph.ops[: graph.n_forward]]
    entries = _entries(modules)
    blocks = Blocks([], [], [], [])
    number, sizes = dict[str, int](), dict[str, int]()
    for module in modules:
        container, entry = _outermost(module, entries)
        name = f"{container}.{entry}".removeprefix(".")
        if entry and name not in number:
            number[name] = len(number)
            blocks.names.append(name)
            blocks.rank.append(sizes.setdefault(container, 0))
            blocks.container.append(list(sizes).index(container))
            sizes[container] += 1
        blocks.of_op.append(number[name] if entry else NO_BLOCK)
    _adopt(blocks.of_op, modules)
    return blocks


def _entries(modules: Sequence[str]) -> dict[str, set[str]]:
    entries: dict[str, set[str]] = {}
    for module in dict.fromkeys(modules):
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                entries.setdefault(".".join(parts[:i]), set()).add(part)
    return entries


def _outermost(module: str, entries: dict[str, set[str]]) -> tuple[str, str]:
    """Container and entry; two empty texts outside of all."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        container = ".".join(parts[:i])
        if part.isdigit() and len(entries[container]) > 1:
            return container, part
    return "", ""


def _adopt(of_op: list[int], modules: Sequence[str]) -> None:
    """Give ops without a module, between ops in blocks, the block before them."""
    following, after = [NO_BLOCK] * len(of_op), NO_BLOCK
    for i in reversed(range(len(of_op))):
        following[i] = after
        if modules[i]:
            after = of_op[i]
    before = NO_BLOCK
    for i, module in enumerate(modules):
        if module:
            before = of_op[i]
        elif following[i] != NO_BLOCK:
            of_op[i] = before


_METHODS = ("nth", "uniform")


@dataclass(frozen=True)
class EveryNLayers:
    """Recompute one block in every n, or keep what enters every n-th block.

    Also called: selective layer checkpointing, `every_n_layers`; uniform: "recompute-num-layers".
    Paper: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, https://arxiv.org/abs/2205.05198, discusses recomputing some of the layers; ``uniform``
    is T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
    https://arxiv.org/abs/1604.06174, with segments of whole blocks.
    Solves: least time within the budget over the one knob n. With method ``nth``, blocks 0, n, 2n,
    … of each container run again and the others keep all. With ``uniform``, every block runs
    again, and n blocks in a row are one segment.
    Optimal: where the step fits without recomputation. Cost: O(ops + reads) for each n tried.
    Shortcomings: the knob is coarse; all blocks count alike; blind to costs and sizes; does not
    apply where no block repeats.

    Attributes
    ----------
    n : 0 tries every n up to the number of blocks and takes the fastest that fits.
    method : ``nth`` recomputes blocks 0, n, 2n, …; ``uniform`` checkpoints n in a row.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    n: int = 0
    method: str = "nth"
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        check_choice("method", self.method, _METHODS)
        if self.n < 0:
            raise SolverError(f"n must be 0 (every n is tried) or more, not {self.n}")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        search = Search.of(self, "every_n_layers", graph, budget_bytes)
        return solve_templates(search, self.templates, NO_REPEATED_BLOCK)

    def templates(self, problem: Problem) -> Iterator[Template]:
        if not (blocks := module_blocks(problem.graph)).names:
            return
        make = nth_blocks if self.method == "nth" else _uniform_blocks
        for n in [self.n] if self.n else range(1, max(blocks.rank) + 2):
            yield make(problem, blocks, n)


def nth_blocks(problem: Problem, blocks: Blocks, n: int) -> Template:
    """Blocks 0, n, 2n, … of each container run again, each a region."""
    again = [block != NO_BLOCK and blocks.rank[block] % n == 0 for block in blocks.of_op]
    return regions(problem, again, blocks.of_op)


def _uniform_blocks(problem: Problem, blocks: Blocks, n: int) -> Template:
    """Every block runs again; n in a row of a container are one region."""
    number: dict[tuple[int, int], int] = {}
    group = [
        number.setdefault((container, rank // n), len(number))
        for container, rank in zip(blocks.container, blocks.rank, strict=True)
    ]
    region = [NO_BLOCK if block == NO_BLOCK else group[block] for block in blocks.of_op]
    return regions(problem, [part != NO_BLOCK for part in region], region)


@dataclass(frozen=True)
class StoreAll:
    """Keep everything: every op once, in captured order, each value freed after its last use.

    Also called: no rematerialisation, save-all, the unmodified step.
    Solves: nothing; it ignores the budget. Optimal in time whenever it fits, since every op
    must run at least once. Cost: O(ops + reads). Shortcomings: the peak is what it is.
    """

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def schedule(self, graph: TrainingGraph) -> Schedule:
        return store_all_state(Problem.of(graph)).schedule(solver="store_all")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        made = store_all_state(Problem.of(graph))
        return evaluate_schedule(
            graph, made.schedule(budget_bytes=budget_bytes, solver="store_all"),
            budget_bytes=budget_bytes, lower_bound_us=graph.time_us,
        )  # fmt: skip
