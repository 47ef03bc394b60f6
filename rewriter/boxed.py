"""Generated code that takes its inputs in a list and lets go of each after its last use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

Boxed = Callable[[list[Any]], Any]


class BoxedCodeGen(CodeGen):
    """Emits ``def forward(self, args_list)`` that unpacks the list and empties it.

    A function that took its inputs one by one would hold every one of them until it
    returned, whatever the schedule says.
    """

    def gen_fn_def(
        self,
        free_vars: list[str],
        maybe_return_annotation: str,
        *,
        expanded_def: bool = False,
    ) -> str:
        """The head of the generated function."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        head = f"def {self._func_name}(self, args_list){maybe_return_annotation}:"
        if names:
            head += f"\n    {', '.join(names)}, = args_list\n    args_list.clear()"
        return head


def compile_boxed(gm: fx.GraphModule, example_inputs: Any) -> Boxed:
    """The compiler handed to AOTAutograd: plain generated Python over ATen ops."""
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()
    run = gm.forward

    def boxed(args_list: list[Any]) -> Any:
        return run(args_list)

    boxed._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return boxed
