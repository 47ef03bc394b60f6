"""The tree of a batch in a plan file runs none of the code that it names."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.utils._pytree as pytree

from remat.graph_capture.errors import PlanError
from remat.graph_capture.tracing.signature import Signature
from remat.rewriter.plans.batch_tree import tree_from
from remat.rewriter.plans.facts import batch_signature, signature_from
from remat.schedules.plan import BatchSignature, PythonLeaf, TensorLeaf


class Side(enum.Enum):
    LEFT = 1


class Named(NamedTuple):
    first: int
    rest: tuple[int, ...]


@dataclasses.dataclass
class Fields:
    first: int
    second: int = 2


class Output(OrderedDict[str, Any]):
    """As Hugging Face's outputs are: a dict with a name of its own, registered by their code."""


NAME = "tests.rewriter.plans.test_batch_tree"


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """The types above, as the running program registers its own."""
    pytree._register_namedtuple(Named, serialized_type_name=f"{NAME}.Named")
    pytree._private_register_pytree_node(
        Fields,
        lambda one: ([one.first, one.second], None),
        lambda values, _: Fields(*values),
        serialized_type_name=f"{NAME}.Fields",
    )
    pytree._private_register_pytree_node(
        Output,
        lambda one: (list(one.values()), list(one)),
        lambda values, keys: Output(zip(keys, values, strict=True)),
        serialized_type_name=f"{NAME}.Output",
        to_dumpable_context=json.dumps,
        from_dumpable_context=json.loads,
    )
    yield
    for kind in (Named, Fields, Output):
        pytree._deregister_pytree_node(kind)


TREES: dict[str, Any] = {
    "usual": (((1, [2]), {"mask": 3}), {}, None),
    "ordered": OrderedDict(a=1, b=(2,)),
    "queue": deque([1, 2], maxlen=3),
    "default": defaultdict(list, a=1),
    "enum as a key": {Side.LEFT: 1},
    "quotes": {'a"\\{"__enum__"': 1},
    "keys of several kinds": {1: 1, "1": 2, None: 3, 2.5: 4},
    "named tuple": Named(1, (2, 3)),
    "dataclass": Fields(1),
    "output": Output(loss=1, logits=2),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_are_read_as_they_were_written(tree: object) -> None:
    spec = pytree.tree_structure(tree)
    assert tree_from(pytree.treespec_dumps(spec)) == spec


def test_a_type_is_taken_only_where_it_is_registered() -> None:
    for kind in ("Unknown", "Side", "NAME"):
        with pytest.raises(PlanError, match=r"nothing here registers it"):
            tree_from(ONE.replace("builtins.list", f"{NAME}.{kind}"))
        with pytest.raises(PlanError, match=r"nothing here registers it"):
            tree_from(
                ONE.replace("builtins.list", "collections.namedtuple").replace(
                    '"null"', f'"{NAME}.{kind}"'
                )
            )
    # Types without a name of their own, whichever was registered last.
    pytree.register_dataclass(dataclasses.make_dataclass("Nameless", ["one"]))
    with pytest.raises(PlanError, match=r"nothing here registers it"):
        tree_from(ONE.replace("builtins.list", "NO_SERIALIZED_TYPE_NAME_FOUND"))


def test_keys_that_json_has_not_are_refused_when_a_plan_is_made() -> None:
    with pytest.raises(PlanError, match="with keys that a plan file cannot hold"):
        batch_signature(Signature((((1, {(1, 2): 3}),), {}, None)))


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
        with pytest.raises(PlanError, match="import the module of 'a_trap:Any'"):
            tree_from(text)
    with pytest.raises(PlanError, match=r"makes default values with a_trap\.Any, which is not one"):
        tree_from(of_factory(trap, "Any"))
    assert trap not in sys.modules
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "place", ["os:system", "os:environ", "remat:capture", "enum:none", ":", "os"]
)
def test_a_tree_takes_nothing_from_modules_but_enums(place: str) -> None:
    with pytest.raises(PlanError, match="it is no enum imported here"):
        tree_from(of_dict([{"__enum__": True, "fqn": place, "name": "PATH"}]))


@pytest.mark.parametrize(
    ("module", "name"), [("builtins", "exit"), ("builtins", "eval"), ("os", "abort"), ("", "")]
)
def test_a_tree_makes_default_values_by_types_alone(module: str, name: str) -> None:
    with pytest.raises(PlanError, match="which is not one of Python's own types"):
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
    "a tuple of fields that it has not": BatchSignature(
        ONE.replace("builtins.list", "collections.namedtuple").replace('"null"', f'"{NAME}.Named"'),
        (LEAF,),
    ),
    "a leaf with parts": BatchSignature(ONE.replace('"builtins.list"', "null"), (LEAF,)),
    "a dict without keys": BatchSignature(ONE.replace("builtins.list", "builtins.dict"), (LEAF,)),
    "a key that is a list": BatchSignature(
        ONE.replace("builtins.list", "builtins.dict").replace('"null"', '"[[1]]"'), (LEAF,)
    ),
    "a deque that is too long": BatchSignature(
        ONE.replace("builtins.list", "collections.deque").replace('"null"', '"0"'), (LEAF,)
    ),
    "containers within containers": BatchSignature(
        "[1, "
        + '{"type": "builtins.list", "context": "null", "children_spec": [' * 150
        + "]}" * 150
        + "]",
        (),
    ),
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
    with pytest.raises(
        PlanError, match=r"cannot read the batch in the plan file|the plan file has dtype"
    ):
        signature_from(batch)


@pytest.mark.parametrize(
    "value", [0, -3, 2.5, float("inf"), True, None, "", "it's", 'a"\n\\\u2028']
)
def test_leaves_are_read_as_they_were_written(value: object) -> None:
    batch = BatchSignature(ONE, (PythonLeaf(type(value).__name__, repr(value)),))
    (read,) = signature_from(batch).others
    assert read == value
    assert type(read) is type(value)
