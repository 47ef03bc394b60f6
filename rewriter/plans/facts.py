"""What a plan keeps of a model, a batch and a machine: facts, read without code of others."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Generator
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from remat.graph_capture.devices.known_devices import CPU, CUDA, is_in_table, modelled_device
from remat.graph_capture.devices.meter import cpu_title
from remat.graph_capture.errors import PlanError, for_caller
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.gradients import GradientRelease
from remat.graph_capture.torch_private.core import FakeTensorMode, pytree
from remat.graph_capture.tracing.recipe import Recipe, autocast_state
from remat.graph_capture.tracing.resident import tied_places
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.guards.live_state import named_state
from remat.rewriter.plans.batch_tree import tree_from
from remat.schedules.outcome import Check
from remat.schedules.plan import (
    Autocast,
    BatchSignature,
    PlanFile,
    Prediction,
    PythonLeaf,
    StateFact,
    TensorLeaf,
    Versions,
)
from remat.schedules.schedule import Schedule

_LITERALS = (bool, int, str, type(None))
_TEXT = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
_VALUES: dict[str, Callable[[str], Any]] = {  # reads the `repr` of an argument: no tensor, no text
    "float": float, "int": int, "bool": {"True": True, "False": False}.__getitem__,
    "NoneType": {"None": None}.__getitem__,
}  # fmt: skip
_UNREADABLE = (  # what torch and Python raise for a tree or a leaf that is none
    ValueError, TypeError, KeyError, AttributeError, SyntaxError, RuntimeError, OverflowError,
    AssertionError,
)  # fmt: skip
_MOST_SHOWN = 40


def _state_of(model: nn.Module) -> tuple[StateFact, ...]:
    named, tied = named_state(model), tied_places(model)
    # `named_state` gives parameters first.
    n_parameters = len(list(model.named_parameters(remove_duplicate=False)))
    return tuple(
        StateFact(
            name=name, kind="parameter" if i < n_parameters else "buffer",
            dtype=_dtype_text(tensor.dtype), shape=tuple(tensor.shape), strides=tensor.stride(),
            trained=tensor.requires_grad, tied_to=named[tied[i]][0] if i in tied else "",
        )
        for i, (name, tensor) in enumerate(named)
    )  # fmt: skip


def _modules_in_eval(model: nn.Module) -> tuple[str, ...]:
    return tuple(path for path, module in model.named_modules() if path and not module.training)


def _loss_name(loss_fn: LossFunction | None) -> str:
    if isinstance(loss_fn, functools.partial):
        return _loss_name(loss_fn.func)
    return "" if loss_fn is None else getattr(loss_fn, "__name__", type(loss_fn).__name__)


def _title_of(device: str) -> str:
    if is_in_table(device):
        return modelled_device(device).title
    return cpu_title() if device == CPU else torch.cuda.get_device_name(device)


def batch_signature(signature: Signature) -> BatchSignature:
    try:
        tree = pytree.treespec_dumps(signature.spec)
    except (NotImplementedError, TypeError) as error:
        raise PlanError(
            "pass the parts of the batch as tuples, lists or dicts: it has a container that a "
            f"plan file cannot hold ({error})"
        ) from error
    try:
        read_again = tree_from(tree)
    except PlanError:
        read_again = None
    if read_again != signature.spec:  # JSON has no tuples, which keys may be
        raise PlanError(
            "use strings or numbers as keys: the batch has a dict or another container with keys "
            "that a plan file cannot hold"
        )
    if signature.as_one:
        i, first = next((i, first) for i, first in enumerate(signature.firsts) if i != first)
        raise PlanError(
            f"pass a copy, {signature.names[i]}.clone(): it is the same tensor as "
            f"{signature.names[first]}, and a plan file holds only shapes"
        )
    leaves = zip(signature.names, signature.tensors, signature.others, strict=True)
    numbers = tuple(signature.held_numbers.items())
    return BatchSignature(tree, tuple(_leaf_facts(*one) for one in leaves), numbers)


def signature_from(batch: BatchSignature) -> Signature:
    try:
        spec = tree_from(batch.tree)
        with FakeTensorMode():  # a fake batch takes no memory
            found = Signature(pytree.tree_unflatten([_leaf(leaf) for leaf in batch.leaves], spec))
        found.held_numbers = {i: number for i, number in batch.numbers if found.tensors[i]}
        return found
    except _UNREADABLE as error:
        raise PlanError(f"cannot read the batch in the plan file: {error}") from error


def _leaf_facts(name: str, facts: Any, value: Any) -> TensorLeaf | PythonLeaf:
    if facts is not None:
        return TensorLeaf(tuple(facts[0]), facts[1], _dtype_text(facts[2]), str(facts[3]), facts[4])
    if type(value) is float or type(value) in _LITERALS:  # exact: a subclass cannot be read
        return PythonLeaf(type(value).__name__, repr(value))
    raise PlanError(
        f"pass what forward needs of {name} as numbers, strings or tensors: it is a "
        f"{type(value).__name__}, which a plan file cannot hold"
    )


def _leaf(leaf: TensorLeaf | PythonLeaf) -> Any:
    if isinstance(leaf, TensorLeaf):
        return torch.empty_strided(
            leaf.shape, leaf.strides, dtype=_dtype_of(leaf.dtype), device=leaf.device,
            requires_grad=leaf.requires_grad,
        )  # fmt: skip
    if leaf.kind == "str":
        if not _TEXT.fullmatch(leaf.text):  # one literal: Python's parser limits nesting
            raise ValueError(f"{leaf.text[:_MOST_SHOWN]} is not text")
        return ast.literal_eval(leaf.text)
    return _VALUES[leaf.kind](leaf.text)


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(text: str) -> torch.dtype:
    found = vars(torch).get(text)  # not getattr, by which torch imports submodules
    if not isinstance(found, torch.dtype):
        raise PlanError(
            f"the batch in the plan file has dtype {text!r}, which this torch does not have"
        )
    return found


@contextlib.contextmanager
def under_autocast(planned: tuple[Autocast, ...]) -> Generator[None]:
    here = [kind for kind, _, _ in autocast_state()]
    with contextlib.ExitStack() as stack:
        for one in planned:
            if one.device in here:  # a plan made beside a GPU may be loaded where there is none
                dtype = _dtype_of(one.dtype)
                stack.enter_context(torch.autocast(one.device, dtype, enabled=one.enabled))
        yield


def recipe_from(plan: PlanFile, loss_fn: LossFunction | None, device: str) -> Recipe:
    return Recipe(  # the caller is `under_autocast` of the plan
        name=plan.model, signature=signature_from(plan.batch), loss_fn=loss_fn,
        resident=plan.resident, autocast=autocast_state(), device=device,
        flags=(plan.told_compiling, plan.told_exporting),
        gradient_release=GradientRelease() if plan.schedule.releases_gradients else None,
        outputs=plan.outputs,
    )  # fmt: skip


def make_plan(
    model: nn.Module, recipe: Recipe, schedule: Schedule, prediction: Prediction | None = None,
    costed: TrainingGraph | None = None, check: Check | None = None,
) -> PlanFile:  # fmt: skip
    flags = recipe.flags or (False, False)  # None before a first trace
    autocast = tuple(Autocast(kind, on, _dtype_text(t)) for kind, on, t in recipe.autocast)
    return PlanFile(
        model=recipe.name, state=_state_of(model), in_eval=_modules_in_eval(model),
        batch=batch_signature(recipe.signature), loss_fn=_loss_name(recipe.loss_fn),
        autocast=autocast, told_compiling=flags[0], told_exporting=flags[1],
        resident=recipe.resident, device=recipe.device, title=_title_of(recipe.device),
        versions=Versions(torch=str(torch.__version__), remat=version("remat")), schedule=schedule,
        prediction=prediction, graph=costed, check=check and check.as_kept(),
        outputs=recipe.outputs,
    )  # fmt: skip


_IN_PYTHON = "remat.plans(remat.rematerialize(model, args, budget=...))[0].save(path)"


def require_fit(plan: PlanFile, model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> None:
    """Raise `PlanError` with the first difference; a `batch` of None waits for the first step."""
    # What a person can name comes first, the graph's hash last (in `loading`): it says less.
    planned, here = plan.versions.torch, str(torch.__version__)
    if planned.partition("+")[0] != here.partition("+")[0]:  # 2.13.0+cpu is 2.13.0
        raise _differs("torch", planned, here)
    _require_device(plan, model)
    _require_model(plan, model)
    if batch is not None:
        _require_batch(plan, batch)
    _require_loss(plan, loss_fn)


def _differs(what: str, planned: object, found: object) -> PlanError:
    return _does_not_fit(f"{what} was {planned} and is {found}")


def _does_not_fit(why: str) -> PlanError:
    how = for_caller(_IN_PYTHON, "remat run MODEL --budget BUDGET -o FILE")
    return PlanError(f"make the plan again with {how}: the plan does not fit, {why}")


def _require_device(plan: PlanFile, model: nn.Module) -> None:
    planned = plan.device if plan.device == CPU else CUDA
    here = next((p.device.type for p in model.parameters()), CPU)
    if here not in (planned, "meta"):
        raise _differs("the device", plan.device, here)
    title = _title_of(here) if here in (CPU, CUDA) else plan.title
    if title != plan.title:
        warnings.warn(
            f"the plan was made for {plan.title} and is loaded on {title}: gradients stay the "
            "same, but workspaces, the peak and times may differ",
            stacklevel=4,
        )


def _require_model(plan: PlanFile, model: nn.Module) -> None:
    if plan.model != type(model).__name__:
        raise _differs("the model's class", plan.model, type(model).__name__)
    found = _state_of(model)
    for mine, theirs in zip(plan.state, found, strict=False):  # not strict: name a difference
        if mine.name != theirs.name:
            raise _differs("a parameter or buffer", mine.name, theirs.name)
        for name in StateFact.__struct_fields__:
            planned, here = getattr(mine, name), getattr(theirs, name)
            if planned != here:
                texts = _fact_text(name, planned), _fact_text(name, here)
                raise _differs(f"{mine.kind} {mine.name}", *texts)
    if len(plan.state) != len(found):
        longer = plan.state if len(plan.state) > len(found) else found
        extra = longer[min(len(plan.state), len(found))]
        here = "is not there" if longer is plan.state else "is new"
        raise _does_not_fit(f"{extra.kind} {extra.name} {here}")
    in_eval = _modules_in_eval(model)
    for path in (*plan.in_eval, *in_eval):
        if (path in plan.in_eval) != (path in in_eval):
            modes = ("eval mode", "training mode")
            raise _differs(f"submodule {path}", *(modes if path in plan.in_eval else modes[::-1]))


def _fact_text(field: str, value: Any) -> str:
    if field == "trained":
        return "trained" if value else "frozen"
    if field == "tied_to":
        return f"tied to {value}" if value else "tied to none"
    return f"of {field} {list(value) if isinstance(value, tuple) else value}"


def _require_batch(plan: PlanFile, batch: Any) -> None:
    planned, found = signature_from(plan.batch), Signature(batch)
    if planned.spec == found.spec and not planned.other_number(pytree.tree_leaves(batch)):
        found.held_numbers = planned.held_numbers
    if planned.spec != found.spec:
        texts = (f"({', '.join(one.names)})" for one in (planned, found))
        raise _differs("the structure of the batch", *texts)
    for mine, theirs in zip(planned.lines(), found.lines(), strict=True):
        if mine != theirs:
            raise _differs("the batch", mine, theirs)


def _require_loss(plan: PlanFile, loss_fn: LossFunction | None) -> None:
    given = _loss_name(loss_fn)
    if plan.loss_fn and not given:
        raise PlanError(
            f"pass loss_fn, as in remat.load(path).apply(model, loss_fn={plan.loss_fn}): the "
            f"plan's step ends in {plan.loss_fn}, and a file cannot hold a function"
        )
    if plan.loss_fn != given:
        raise _differs("the loss function", plan.loss_fn or "none", given)
