"""Code that looks at the values of tensors is refused, with what to write in its place.

Most looks have one usual reason, by which function of torch or which op looks: each has its way
out. What a graph would need there is a size or a branch that is known before the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.known_values import RANDOM

_DATA_DEPENDENT = (
    "DataDependentOutputException",
    "GuardOnDataDependentSymNode",
    "DynamicOutputShapeException",
    "UnsupportedOperatorException",
)

_WAYS_OUT = {
    "_detect_is_causal_mask": "pass is_causal=True beside a causal mask, or is_causal=False",
    "_canonical_mask": "pass masks as floating point numbers, or as bool",
    "__init__ of Distribution": "make the distribution with validate_args=False",
}
"""By the function of torch that looks at values: how to keep it from doing so."""

_OF_A_MASK = (
    "a mask decides how many rows x[mask], nonzero and torch.where(mask) give: keep all rows, and "
    "use torch.where(mask, x, 0) or x * mask, or take a fixed number of them by topk"
)
_OF_UNIQUE = (
    "the values decide how many of them unique gives: call it outside forward, and pass what comes "
    "of it"
)
_OF_A_LOSS = (
    "the work of ctc_loss depends on the lengths of its targets: plan the model without it, that "
    "is, return its log-probabilities, give no loss_fn, and call ctc_loss on them in your loop"
)
_INSTEAD = {
    "aten._ctc_loss": _OF_A_LOSS,
    "aten.nonzero": _OF_A_MASK,
    "aten.masked_select": _OF_A_MASK,
    "aten._unique2": _OF_UNIQUE,
    "aten.unique_consecutive": _OF_UNIQUE,
    "aten.unique_dim": _OF_UNIQUE,
    "aten.repeat_interleave": (
        "a tensor decides how many rows repeat_interleave makes: give output_size, a Python number"
    ),
    "aten.bincount": (
        "the greatest value decides how many bins bincount makes: use "
        "torch.zeros(n).scatter_add_(0, index, weights), or one_hot(index, n).sum(0)"
    ),
    "aten._pack_padded_sequence": (
        "packed sequences have the sizes that lengths say: give the layer the padded batch, and "
        "mask what it returns"
    ),
    "aten._local_scalar_dense": (
        "a number is read from a tensor, by `if`, .item(), int(), float(), one_hot without "
        "num_classes or as a size: use torch.where in place of a branch; or pass the number to "
        "forward as a Python number, of which remat.plan_cache makes a plan each"
    ),
}
"""By the op whose result's shape or value is asked for: what to write in its place."""

_ANY = "replace the `if`, `.item()` or index by tensor ops such as torch.where or masking"


def is_of_values(error: Exception) -> bool:
    """Whether a trace failed since code looked at the values of a tensor."""
    return type(error).__name__ in _DATA_DEPENDENT or "data-dependent" in str(error).lower()


def branch_on_values(place: str, read: Sequence[str], said: str) -> CaptureError:
    """The refusal of code that looks at values.

    Parameters
    ----------
    read : the arguments whose values were looked at, and `RANDOM`, if nothing else had a part.
    said : the first line of what torch says, which ends in the name of the op that looks.
    """
    named = " and ".join(name for name in read if name != RANDOM)
    what, ways = "", list[str]()
    if named:
        what = f", the values of {named},"
        ways.append(f"leave {named} out, if the model can do without it.")
    elif read:
        what = f", {RANDOM},"
        ways.append(
            "set the option that has it drawn (layerdrop, stochastic depth) to 0, if nothing is "
            "drawn then, or draw it outside forward and pass a Python number, of which "
            "remat.plan_cache makes a plan each."
        )
    ways.append(
        f"{_instead_of(said)}; or plan the parts before and after it separately, each by "
        'remat.rematerialize. Or plan with torch.compile(model, backend="remat"), which breaks '
        "the graph there."
    )
    text = " Or: ".join(ways)
    return CaptureError(
        f"control flow or a shape depends on tensor data{what} ({place}): one static graph cannot "
        f"hold both branches. {text[0].upper()}{text[1:]} torch said: {said}"
    )


def _instead_of(said: str) -> str:
    op = said.rpartition(".")[0].split(" ")[-1]
    return _INSTEAD.get(op, _ANY)


def known_way_out(error: Exception) -> str:
    """What the user can do where a function of torch looks at values; empty if it is not known."""
    frames = [] if error.__traceback__ is None else list(walk_tb(error.__traceback__))
    for frame, _ in reversed(frames):
        name = frame.f_code.co_name
        if frame.f_code.co_filename.endswith("distributions/distribution.py"):
            name = "__init__ of Distribution"
        if name in _WAYS_OUT:
            return _WAYS_OUT[name]
    return ""
