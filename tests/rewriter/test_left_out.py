"""Results that training does not use are left out of its step, and cannot be read by mistake."""

from __future__ import annotations

import copy
import dataclasses
import logging
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import remat
from remat.graph_capture.errors import CaptureError, LeftOutError
from remat.graph_capture.tracing.left_out import LeftOut

WORDS = 256


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor
    aux: Tensor | None = None


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


class KeyValueCache:
    """Holds tensors where torch cannot find them."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str | int, ...], str | int]] = {
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, ("loss",), "logits"),
    "dataclass": (Output, ("loss",), "logits"),
    "tuple": (lambda loss, logits: (loss, logits), (0,), 1),
    "list": (lambda loss, logits: [logits, loss], (1,), 0),
    "named tuple": (Named, ("loss",), "logits"),
}


class Model(nn.Module):
    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.words, self.drop = nn.Embedding(WORDS, 16), nn.Dropout(0.1)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.norm(self.drop(self.words(x).flatten(0, 1))))
        return KINDS[self.kind][0](cross_entropy(logits, x.flatten()), logits)


def batch(rows: int = 16) -> Tensor:
    return torch.randint(WORDS, (rows, 16))


def part(result: Any, name: str | int) -> Any:
    is_attribute = dataclasses.is_dataclass(result) or hasattr(result, "_fields")
    return getattr(result, str(name)) if is_attribute else result[name]


def trained(module: nn.Module, x: Tensor, used: str | int) -> list[Tensor]:
    """The loss, every gradient and every buffer of a step, and a number drawn after it."""
    torch.manual_seed(1)
    loss = part(module(x), used)
    loss.backward()
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    return [loss.detach(), *gradients, *module.buffers(), torch.rand(1)]


def require_equal(mine: list[Tensor], eagers: list[Tensor]) -> None:
    assert len(mine) == len(eagers) > 6
    assert all(map(torch.equal, mine, eagers))


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_result_gives_eagers_bits(kind: str, budget: str) -> None:
    _, outputs, left = KINDS[kind]
    model, x = Model(kind), batch()
    eager = copy.deepcopy(model)
    fast = remat.rematerialize(model, (x,), budget=budget, outputs=outputs, check=True)
    require_equal(trained(fast, x, outputs[0]), trained(eager, x, outputs[0]))
    result = fast(x)
    assert type(result) is type(model(x))
    assert isinstance(part(result, left), LeftOut)
    assert remat.check(model, fast, (x,), steps=1).differences == ()


@pytest.mark.filterwarnings("ignore:.*stays whole")
def test_what_made_it_need_not_stay_in_memory() -> None:
    x = batch(64)
    kept, left = (
        remat.solve(remat.capture(Model(), (x,), outputs=outputs, split="exact"), "min").peak_bytes
        for outputs in (None, ("loss",))
    )
    assert left < 0.6 * kept


READS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda it: it.shape,
    "a method": lambda it: it.float(),
    "an index": lambda it: it[0],
    "a sum": lambda it: it + 1,
    "a tensor before it": lambda it: torch.ones(2) @ it,
    "a comparison": lambda it: it == 1,
    "a truth": bool,
    "a loop": list,
    "a length": len,
    "a number": float,
    "a write": lambda it: operator.setitem(it, 0, 1),
    "a function of torch": lambda it: torch.softmax(it, -1),
    "a loss by name": lambda it: cross_entropy(input=it, target=torch.zeros(1)),
    "a list in a function": lambda it: torch.stack([torch.ones(2), it]),
    "a tensor made of it": torch.tensor,
    "an array made of it": np.asarray,
    "a function of NumPy": lambda it: np.add(1, it),
}


@pytest.mark.parametrize("read", READS)
def test_who_reads_it_is_told_which_and_what_to_do(read: str) -> None:
    x = batch()
    fast = remat.rematerialize(Model(), (x,), budget="100%", outputs=("loss",), check=False)
    with pytest.raises(LeftOutError) as told:
        READS[read](fast(x)["logits"])
    assert str(told.value) == (
        "leave out outputs=..., or name 'logits' in it: result 'logits' was read, and the planned "
        "training step returns only 'loss'"
    )


def test_it_can_be_printed_copied_and_passed_on() -> None:
    x = batch()
    fast = remat.rematerialize(Model(), (x,), budget="100%", outputs=("loss",), check=False)
    left = fast(x)["logits"]
    assert repr(left) == "<'logits', left out of the training step>"
    assert not hasattr(left, "dtype")
    for one in (copy.copy(left), copy.deepcopy([left])[0], pickle.loads(pickle.dumps(left))):
        with pytest.raises(LeftOutError, match="name 'logits' in it"):
            one.sum()


def test_a_loss_may_have_it_and_not_read_it() -> None:
    x, model = batch(), Model()
    fast = remat.rematerialize(
        model, (x,), loss_fn=lambda out: 2 * out["loss"], budget="min", outputs="loss", check=True
    )
    fast(x).backward()
    with pytest.raises(LeftOutError, match=r"^leave out outputs=\.\.\., or name 'logits' in it"):
        remat.rematerialize(
            model, (x,), loss_fn=lambda out: out["logits"].sum(), budget="min", outputs="loss"
        )


def test_in_eval_mode_and_without_gradients_all_is_returned() -> None:
    x, fast = batch(), remat.rematerialize(Model(), budget="100%", outputs=("loss",))
    assert isinstance(fast(x)["logits"], LeftOut)
    with torch.no_grad():
        assert isinstance(fast(x)["logits"], Tensor)
    fast.eval()
    assert isinstance(fast(x)["logits"], Tensor)


def test_a_cache_has_it_at_every_size_and_says_what_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    eager = copy.deepcopy(model)
    cache = remat.rematerialize(model, budget="100%", outputs=("loss",))
    with caplog.at_level(logging.INFO, "remat"):
        for rows in (8, 5):
            x = batch(rows)
            require_equal(trained(cache, x, "loss"), trained(eager, x, "loss"))
    assert "Model on int64[8, 16], without logits: " in caplog.text
    assert len(remat.plans(cache)) == 2
    assert remat.check(model, cache, (x,), steps=1).differences == ()


def test_steps_are_audited_without_it() -> None:
    x, fast = batch(), remat.rematerialize(Model(), budget="100%", outputs=("loss",))
    for _ in range(2):
        fast(x)["loss"].backward()
    assert "1 of 2 steps" in repr(fast.audit)


def test_a_copy_a_file_and_a_pickle_keep_it(tmp_path: Path) -> None:
    x, model = batch(), Model()
    fast = remat.rematerialize(model, (x,), budget="min", outputs=("loss",))
    remat.plans(fast)[0].save(tmp_path / "plan.json")
    loaded = remat.load(tmp_path / "plan.json").apply(copy.deepcopy(model))
    again = pickle.loads(pickle.dumps(fast))
    cache = copy.deepcopy(remat.rematerialize(model, budget="min", outputs=("loss",)))
    eager = copy.deepcopy(model)
    expected = trained(eager, x, "loss")
    for module in (copy.deepcopy(fast), loaded, again, cache):
        require_equal(trained(module, x, "loss"), expected)
        assert isinstance(module(x)["logits"], LeftOut)


def test_a_captured_step_is_applied_with_and_without_its_batch() -> None:
    x, model = batch(), Model()
    plan = remat.solve(remat.capture(model, (x,), outputs=("loss",)), "min")
    for given in ((), ((x,),)):
        assert isinstance(plan.apply(model, *given)(x)["logits"], LeftOut)


def test_sizes_may_vary_and_updates_be_made_in_backward() -> None:
    model = Model()
    dynamic: Any = {"x": {0: ("rows", 4, 32)}}
    ranged = remat.rematerialize(
        model, (batch(),), budget="100%", outputs=("loss",), dynamic=dynamic
    )
    assert isinstance(ranged(batch(7))["logits"], LeftOut)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updating = remat.rematerialize(
        model, (batch(),), budget="min", outputs=("loss",), optimizer_in_backward=optimizer
    )
    updating(batch())["loss"].backward()


@pytest.mark.slow
def test_code_of_inductor_leaves_it_out() -> None:
    x = batch()
    fast = remat.rematerialize(Model(), (x,), budget="100%", outputs=("loss",), compile=True)
    assert isinstance(fast(x)["logits"], LeftOut)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (("loss", "logit"), "name some of 'loss', 'logits' in outputs: forward returns no 'logit'"),
        ((0,), "name some of 'loss', 'logits' in outputs: forward returns no 0"),
        ((), r"give outputs=\('loss',\), the names .*outputs=\(\) names none"),
        ((True,), r"give outputs=\('loss',\), the names .*outputs=\(True,\) names none"),
        (3.0, r"give outputs=\('loss',\), the names .*outputs=3.0 names none"),
    ],
)
def test_names_of_no_result_are_refused(outputs: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        remat.rematerialize(Model(), (batch(),), budget="100%", outputs=outputs)


def test_a_result_without_parts_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"leave out outputs=\(0,\): forward returns a result"):
        remat.capture(nn.Linear(4, 4), (torch.ones(2, 4),), outputs=(0,))


def test_a_cache_that_no_graph_can_return_is_left_out_by_itself() -> None:
    class Caching(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) | {"cache": KeyValueCache(self.words(x)), "n": None}

    x, model = batch(), Caching()
    fast = remat.rematerialize(model, (x,), budget="min", check=True)
    result = fast(x)
    assert isinstance(result["logits"], Tensor)
    assert result["n"] is None
    with pytest.raises(LeftOutError, match=r"read 'cache' in eval mode or under torch\.no_grad"):
        result["cache"].keys.sum()
    with pytest.raises(CaptureError, match="'cache'] of Caching is a KeyValueCache, whose tensors"):
        remat.capture(model, (x,), outputs=("loss", "cache"))
