"""Forward that gives a tensor other data, by `tensor.data = other`: refused.

A trace loses it without a word: only the stand-in of the tensor has the new data. Torch's own
`vector_to_parameters` sets data so, and code that averages weights does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import line_of_user


class NoNewData(TorchFunctionMode):
    """While forward is traced, refuse code that gives a tensor other data.

    Raises
    ------
    CaptureError : names the line, and what works.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.set_data: Any = torch.Tensor.data.__set__  # pyright: ignore

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, unless it gives a tensor other data."""
        line = line_of_user() if func == self.set_data else ""  # torch does so too, beside it
        if line:
            raise CaptureError(
                f"forward of {self.kind} gives a tensor other data, by .data ={line}, and in a "
                "step of a plan it would keep what it has. Write into the tensor instead: "
                "tensor.data.copy_(other); or do it outside forward, before or after the step"
            )
        return func(*args, **(kwargs or {}))
