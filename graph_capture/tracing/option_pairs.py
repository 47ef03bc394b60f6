"""Options that do not go together: each pair, why, and what to do instead (`docs/limits.md`)."""

from __future__ import annotations

from typing import NamedTuple

from remat.graph_capture.errors import ArenaError, CaptureError, RematError, RewriteError


class OptionPair(NamedTuple):
    """`other` is not taken with `one`, both as in Python; `why` and `instead` are a clause each."""

    other: str
    one: str
    why: str
    instead: str
    error: type[RematError]

    def __str__(self) -> str:
        one = _SHOWN.get(self.one, self.one)
        return f"{self.instead}: {self.other} is not taken with {one}, as {self.why}"


_SHOWN = {"dynamic": "dynamic sizes", "compile": "compile=True", "cuda_graphs": "cuda_graphs=True"}
_EITHER = "leave out one of the two"
_EACH_SIZE = "leave out one of the two, or plan for each size"
_BY_BLOCK = (  # which `StepSpec` lets pass
    "plan by blocks for fully_shard, with blocks= and remat.Sharding('fsdp2', ...), or leave out "
    "one of the two"
)


def _with(
    one: str, error: type[RematError], **whys: str | tuple[str, str]
) -> tuple[OptionPair, ...]:
    usual = _EACH_SIZE if one == "dynamic" else _EITHER
    told = {name: why if isinstance(why, tuple) else (why, usual) for name, why in whys.items()}
    return tuple(OptionPair(name, one, *of_name, error) for name, of_name in told.items())


PAIRS = (
    *_with(
        "dynamic", CaptureError,
        cuda_graphs="a graph is captured for one size",
    ),
    *_with(
        "compile", RewriteError,
        sharding=(
            "Inductor's code is judged without what a wrapper holds",
            "leave out compile=True, or train on one rank",
        ),
        blocks="each block runs eager's ops",
    ),
    *_with(
        "optimizer_in_backward", CaptureError,
        sharding=("wrappers for several ranks take the gradients first", _BY_BLOCK),
        group=("wrappers for several ranks take the gradients first", _BY_BLOCK),
    ),
    *_with(
        "cuda_graphs", RewriteError,
        compile="Inductor's code is not run from graphs",
        host="copies to the host end on streams of their own",
        nvme="the host waits for files, which no graph repeats",
        float_inputs=(
            "a graph keeps the numbers of the step that was captured",
            "leave out one of the two, or pass the number to forward as a tensor",
        ),
        optimizer_in_backward="optimizers run on the host between kernels",
        sharding="wrappers for several ranks move parameters between steps",
        group="other ranks' hosts take part in a step with collectives",
        blocks="each block would have a pool of its own",
    ),
    *_with(
        "blocks", CaptureError,
        solver="blocks have a solver of their own",
    ),
    *_with(
        "use_arena", ArenaError,
        accumulate="an arena does not follow gradients that are released while backward runs",
        optimizer_in_backward="an arena serves whole graphs, and updates run between their ops",
        dynamic="places are planned for one size",
        blocks="an arena is for one rewritten module",
    ),
)  # fmt: skip
# All options that not all others go with.
PAIRED = tuple(sorted({name for pair in PAIRS for name in (pair.one, pair.other)}))


def require_compatible(**asked: object) -> None:
    """Raise the error of the first pair of which `asked` has something true for both."""
    for pair in PAIRS:
        if asked.get(pair.one) and asked.get(pair.other):
            raise pair.error(str(pair))


def not_taken_with(name: str) -> set[str]:
    """The options that `name` does not go with, in whichever order a pair has them."""
    pairs = ({pair.one, pair.other} for pair in PAIRS)
    return set[str]().union(*(pair - {name} for pair in pairs if name in pair))


def as_table() -> str:
    """The pairs in Markdown: by option, those that are not taken with it."""
    by_one: dict[str, list[str]] = {}
    for pair in PAIRS:
        by_one.setdefault(pair.one, []).append(f"`{pair.other}`")
    rows = (f"|`{one}`|{', '.join(others)}|" for one, others in by_one.items())
    return "\n".join(["|with|not|", "|---|---|", *rows])
