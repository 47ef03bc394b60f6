"""Ops that no plan can replay, and the messages that refuse them.

Each message names module, line and a way out. Two of them are also used before a trace, where the
module alone tells that such an op would come (`refuse.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import mutates, target_name, tensors_of

FUSED_LSTM = "aten.mkldnn_rnn_layer"
CUDNN_RNN = "aten._cudnn_rnn"
EFFECTS = "with_effects"


def refuse_op(node: fx.Node, place_of: Callable[[fx.Node], tuple[str, str]]) -> None:
    """Raise `CaptureError` if the op of `node` cannot be part of a plan.

    Parameters
    ----------
    place_of : gives module and line of a node; called only for one that is refused.
    """
    name = target_name(node)
    refuse_sparse(node, place_of)
    if name.startswith(FUSED_LSTM):
        raise CaptureError(fused_lstm_message(", ".join(filter(None, place_of(node)))))
    if name.startswith(CUDNN_RNN):
        raise CaptureError(cudnn_rnn_message(f"{name} {_where(*place_of(node))}"))
    if name.startswith(EFFECTS):
        effect = next((str(arg) for arg in node.args if not isinstance(arg, fx.Node)), name)
        raise CaptureError(
            f"{effect} {_where(*place_of(node))} acts on more than its results, such as by "
            "raising an error for some values, and a step that is replayed cannot order it. Use a "
            "form without: torch.linalg.cholesky_ex in place of cholesky, inv_ex of inv, "
            "solve_ex of solve"
        )
    if mutates(node):
        raise CaptureError(
            f"{name} {_where(*place_of(node))} writes to its input inside the graph, which cannot "
            "be replayed. Use its out-of-place form"
        )


def refuse_sparse(node: fx.Node, place_of: Callable[[fx.Node], tuple[str, str]]) -> None:
    """Raise `CaptureError` if `node` gives a sparse tensor; `place_of` as for `refuse_op`."""
    if any(t.layout != torch.strided for t in tensors_of(node) if t is not None):
        raise CaptureError(
            f"{node.name} {_where(*place_of(node))} makes a sparse tensor, which has no storage "
            "to plan for. Use a dense one, by sparse=False of the embedding"
        )


def _where(module: str, source: str) -> str:
    return f"of module {module or '(root)'} ({source or 'unknown line'})"


def fused_lstm_message(place: str) -> str:
    """The refusal of oneDNN's LSTM, whose backward needs what no graph can hold."""
    return (
        "nn.LSTM on CPU runs as one oneDNN op with a hidden workspace, which cannot be replayed "
        f"({place or 'the whole model'}). Unroll it over time, h, c = nn.LSTMCell(...)(x[t], (h, "
        "c)) for each t, or capture and train under torch.backends.mkldnn.flags(enabled=False)"
    )


def cudnn_rnn_message(place: str) -> str:
    """The refusal of cuDNN's recurrent layers, whose backward cannot run twice."""
    return (
        f"{place or 'a recurrent layer'} runs as one cuDNN op, whose backward writes to a hidden "
        "workspace and whose dropout draws from a hidden state, so it cannot be replayed. Unroll "
        "it over time with nn.LSTMCell or nn.GRUCell, or capture and train under "
        "torch.backends.cudnn.flags(enabled=False)"
    )
