"""The tree of a batch in a plan file runs none of the code that it names."""

from __future__ import annotations

import enum
import json
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch.utils._pytree as pytree

from remat.graph_capture.errors import PlanError
from remat.rewriter.plans.batch_tree import tree_from
from remat.rewriter.plans.facts import signature_from
from remat.schedules.plan import BatchSignature, PythonLeaf, TensorLeaf


class Side(enum.Enum):
    LEFT = 1


TREES: dict[str, Any] = {
    "usual": (((1, [2]), {"mask": 3}), {}, None),
    "ordered": OrderedDict(a=1, b=(2,)),
    "queue": deque([1, 2], maxlen=3),
    "default": defaultdict(list, a=1),
    "enum as a key": {Side.LEFT: 1},
    "quotes": {'a"\\{"__enum__"': 1},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_are_read_as_they_were_written(tree: object) -> None:
    spec = pytree.tree_structure(tree)
    assert tree_from(pytree.treespec_dumps(spec)) == spec


def of_dict(context: object) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": json.dumps(context), "children_spec": [leaf]}
    return json.dumps([1, tree])


def of_factory(module: str, name: str) -> str:
    context = {
        "default_factory_module": module, "default_factory_name": name, "dict_context": [],
    }  # fmt: skip
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    return json.dumps([1, tree])


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that says so when it is imported."""
    (tmp_path / "a_trap.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Any: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "a_trap"


def test_a_tree_imports_no_module(trap: str, tmp_path: Path) -> None:
    named = {"__enum__": True, "fqn": f"{trap}:Any", "name": "x"}
    nested = {"type": "builtins.list", "context": json.dumps([named]), "children_spec": []}
    escaped = of_dict([named]).replace("__enum__", "\\\\u005f_enum__")
    for text in (
        of_dict([named]), of_dict([[named]]), of_dict([{"a": named}]), escaped,
        json.dumps([1, {**nested, "type": "builtins.tuple", "children_spec": [nested]}]),
    ):  # fmt: skip
        with pytest.raises(PlanError, match="names 'a_trap:Any', which is no enum"):
            tree_from(text)
    with pytest.raises(PlanError, match=r"makes default values by a_trap\.Any, which is no type"):
        tree_from(of_factory(trap, "Any"))
    assert trap not in sys.modules
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "place", ["os:system", "os:environ", "remat:capture", "enum:none", ":", "os"]
)
def test_a_tree_takes_nothing_from_modules_but_enums(place: str) -> None:
    with pytest.raises(PlanError, match="which is no enum that is imported here"):
        tree_from(of_dict([{"__enum__": True, "fqn": place, "name": "PATH"}]))


@pytest.mark.parametrize(
    ("module", "name"), [("builtins", "exit"), ("builtins", "eval"), ("os", "abort"), ("", "")]
)
def test_a_tree_makes_default_values_by_types_alone(module: str, name: str) -> None:
    with pytest.raises(PlanError, match="which is no type of Python's own"):
        tree_from(of_factory(module, name))


LEAF = PythonLeaf("int", "1")
ONE = '[1, {"type": "builtins.list", "context": "null", "children_spec": [{"type": null, "context": null, "children_spec": []}]}]'  # noqa: E501
WRONG = {
    "deep": BatchSignature("[" * 100_000, ()),
    "deep and whole": BatchSignature("[" * 900 + "]" * 900, ()),
    "deep context": BatchSignature(of_dict("{").replace('\\"{\\"', '"' + "[" * 10_000 + '"'), ()),
    "no protocol": BatchSignature("[9, {}]", ()),
    "object": BatchSignature("{}", ()),
    "unknown type": BatchSignature(ONE.replace("builtins.list", "os.system"), (LEAF,)),
    "children of another kind": BatchSignature('[1, {"type": 1, "children_spec": 2}]', ()),
    "too few leaves": BatchSignature(ONE, ()),
    "unknown kind": BatchSignature(ONE, (PythonLeaf("list", "[1]"),)),
    "call": BatchSignature(ONE, (PythonLeaf("str", "__import__('os')"),)),
    "sum of texts": BatchSignature(ONE, (PythonLeaf("str", "'a' + 'b'"),)),
    "deep leaf": BatchSignature(ONE, (PythonLeaf("int", "-" * 100_000 + "1"),)),
    "deep text": BatchSignature(ONE, (PythonLeaf("str", "'a'" + "[0]" * 100_000),)),
    "many digits": BatchSignature(ONE, (PythonLeaf("int", "9" * 10_000),)),
    "no flag": BatchSignature(ONE, (PythonLeaf("bool", "1"),)),
    "huge shape": BatchSignature(ONE, (TensorLeaf((1 << 80,), (1,), "float32", "cpu", False),)),
    "negative shape": BatchSignature(ONE, (TensorLeaf((-1,), (1,), "float32", "cpu", False),)),
    "strides of another rank": BatchSignature(ONE, (TensorLeaf((1,), (), "int8", "cpu", False),)),
    "no device": BatchSignature(ONE, (TensorLeaf((1,), (1,), "int8", "\x1b", False),)),
    "no dtype": BatchSignature(ONE, (TensorLeaf((1,), (1,), "nn.Module", "cpu", False),)),
    "trained numbers": BatchSignature(ONE, (TensorLeaf((1,), (1,), "int8", "cpu", True),)),
}


@pytest.mark.parametrize("batch", WRONG.values(), ids=WRONG)
def test_a_batch_that_is_none_is_refused(batch: BatchSignature) -> None:
    with pytest.raises(PlanError, match=r"the plan file (cannot be read|names a dtype)"):
        signature_from(batch)


@pytest.mark.parametrize(
    "value", [0, -3, 2.5, float("inf"), True, None, "", "it's", 'a"\n\\\u2028']
)
def test_leaves_are_read_as_they_were_written(value: object) -> None:
    batch = BatchSignature(ONE, (PythonLeaf(type(value).__name__, repr(value)),))
    (read,) = signature_from(batch).others
    assert read == value
    assert type(read) is type(value)
