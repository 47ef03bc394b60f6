"""Which ops must not run twice, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import CUSTOM, Phase
from remat.graph_capture.joint.batch_norm import CHOSEN_BACKWARD
from remat.graph_capture.joint.nodes import argument, draws_randomness, is_custom, tensors_of
from remat.graph_capture.joint.provenance import path_in_model


def why_pinned(
    node: fx.Node,
    phase: Phase,
    inputs: Sequence[str],
    overwritten: Mapping[str, str],
    place: tuple[str, str],
) -> str:
    """Why the op of `node` must not run twice; empty if it may.

    Parameters
    ----------
    inputs : values that it reads. overwritten : as of `overwritten_values`.
    place : its module and its line.

    Raises
    ------
    CaptureError : it reads in backward what forward overwrites.
    """
    for name in inputs:
        if name in overwritten and phase == "forward":
            return f"it reads {overwritten[name]}, which the step overwrites"
        if name in overwritten:
            module, source = place
            raise CaptureError(
                f"backward of module {module or '(root)'} ({source}) reads "
                f"{overwritten[name]}, which forward overwrites. Give forward a copy: "
                "x.clone() before the in-place change"
            )
    if argument(node, "generator") is not None:
        return "it draws from a generator of its own"
    if node.target is CHOSEN_BACKWARD:  # cuDNN's
        return "it may write to what its forward has reserved for it"
    if draws_randomness(node) and phase == "backward":
        return "it draws random numbers in backward"
    if all(t is None for t in tensors_of(node)):
        return "it has effects only"
    return why_custom(node)


def why_custom(node: fx.Node) -> str:
    """Why a custom op must not run twice unless the user asks for it; empty for other ops.

    One that is tagged as drawing draws the same numbers again, from the state that was saved.
    """
    if not is_custom(node) or draws_randomness(node):
        return ""
    return f"{CUSTOM} may draw or act without a tag, unless recompute names its module"


def overwritten_values(
    nodes: Sequence[fx.Node], overwritten_inputs: Sequence[Any]
) -> dict[str, str]:
    """Resident values that the step overwrites, with the names that users know them by.

    Parameters
    ----------
    overwritten_inputs : AOTAutograd's description of the input that each result of forward
        overwrites, or None.
    """
    overwritten = {what for what in overwritten_inputs if what is not None}
    return {
        node.name: path_in_model(str(getattr(node.meta["desc"], "target", node.name)))
        for node in nodes
        if node.op == "placeholder" and node.meta.get("desc") in overwritten
    }
