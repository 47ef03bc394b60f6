"""What cannot be done exactly is refused, with the cause, the place and the way out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture import capture
from remat.graph_capture.errors import (
    CaptureError,
    DeviceError,
    RewriteError,
    ScheduleError,
    SignatureError,
)
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from tests.models import BATCH, WIDTH, Scalar, batch, make, mlp
from tests.steps import rewritten, schedule_of


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


class Item(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean() * x.max().item()


class NoGradient(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach().mean()


@pytest.mark.parametrize("model", [Branching(), Item()], ids=["if", "item"])
def test_data_dependent_code_is_refused_with_its_line(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match=r"depends on tensor data") as caught:
        capture(model, (batch(),))
    assert "tests/rewriter/test_refusals.py:" in str(caught.value)
    assert "torch.where" in str(caught.value)


def test_batch_norm_without_momentum_is_refused() -> None:
    model = Scalar(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)))
    with pytest.raises(CaptureError, match=r"module body\.1 of Scalar"):
        capture(model, (batch(),))


def test_inputs_in_another_dtype_are_told_of_what_casts() -> None:
    module = rewritten("plain")[1]
    with pytest.raises(
        SignatureError, match=r"(?s)MixedPrecisionPolicy does.*model\.to\(torch\.bf"
    ):
        module(batch().to(torch.bfloat16))
    with pytest.raises(SignatureError, match=r"another plan for this shape"):
        module(batch()[:3])


class TellsCompilers(Branching):
    """Takes another way, with other bits, where it is told that it is compiled."""

    def __init__(self, *, is_traceable: bool) -> None:
        super().__init__()
        self.is_traceable = is_traceable

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if torch.compiler.is_compiling():
            return y.exp().mean()
        if not self.is_traceable and (x > 1e9).any():
            raise ValueError("x is too large")
        return y.mean()


def test_models_are_traced_as_in_eager_not_as_compiled() -> None:
    targets = {op.target for op in capture(TellsCompilers(is_traceable=True), (batch(),)).ops}
    assert "aten.exp.default" not in targets


def test_a_model_that_only_traces_as_compiled_is_warned_about_and_checked() -> None:
    model, x = TellsCompilers(is_traceable=False), batch()
    with pytest.warns(
        UserWarning, match=r"(?s)traced as if under torch\.compile.*test_refusals\.py"
    ):
        graph = capture(model, (x,))
    assert "aten.exp.default" in {op.target for op in graph.ops}
    module = rewrite(model, schedule_of(graph, "store_all"))
    assert not check(model, module, (x,)).outputs_equal


class Averaging(Branching):
    """Puts another tensor in the place of its buffer, and reads it at the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).square().mean()


def test_a_buffer_that_forward_replaces_is_refused_and_stays() -> None:
    model = Averaging()
    before = model.mean
    with pytest.raises(
        CaptureError, match=r"(?s)copy_.*Averaging puts another tensor in the place of mean"
    ):
        capture(model, (batch(),))
    assert model.mean is before


class Cholesky(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.linalg.cholesky(y.mT @ y + 99 * torch.eye(WIDTH)).diagonal().log().sum()


def test_ops_with_effects_are_refused_with_their_line() -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)cholesky_ex.*_linalg_check_errors.*test_refusals.py"
    ):
        capture(Cholesky(), (batch(),))


class FirstResult(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        results = self.inner(x)
        return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize(("can", "elements"), [("AVX512", 32), ("AVX2", 16), ("DEFAULT", 16)])
def test_gates_of_rows_that_no_vector_fits_are_refused_by_name(
    can: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: can)
    x = torch.randn(4, 8)
    with pytest.raises(
        CaptureError, match=rf"hidden_size {elements}, .*: 0 is a GRU of hidden_size 8"
    ):
        capture(nn.Sequential(nn.GRU(8, 8)), (x,))
    with pytest.raises(
        CaptureError, match=r"hidden_size (48|64), .*: 0 is a GRUCell of hidden_size 40"
    ):
        capture(nn.Sequential(nn.GRUCell(8, 40)), (x,))
    double = nn.Sequential(nn.GRUCell(8, elements // 2)).double()
    assert capture(double, (x.double(),)).ops


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_gru_that_is_not_refused_here_is_exact(kind: type[Any], dtype: torch.dtype) -> None:
    for width in (8, 16, 24, 32, 48):
        torch.manual_seed(0)
        cell = FirstResult(kind(8, width).to(dtype))
        x = torch.randn(4, 8, dtype=dtype)
        with contextlib.suppress(CaptureError):
            remat.rematerialize(cell, (x,), budget="150%", solver="store_all")  # checks bits


def test_scripted_modules_are_refused_by_name() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"0 is compiled by torch\.jit"):
        capture(model, (batch(),))


def test_a_step_without_backward_is_refused() -> None:
    with pytest.raises(CaptureError, match="no backward to plan"):
        capture(NoGradient(), (batch(),))


def test_eval_mode_frozen_and_meta_models_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"model\.train\(\) .*eval mode"):
        capture(mlp().eval(), (batch(),))
    with pytest.raises(CaptureError, match=r"no parameter of Sequential requires grad"):
        capture(mlp().requires_grad_(False), (batch(),))
    with pytest.raises(CaptureError, match="meta device"):
        capture(mlp().to("meta"), (batch(),))
    with pytest.raises(CaptureError, match="is not initialised"):
        capture(nn.Sequential(nn.LazyLinear(3)), (batch(),))


def test_unknown_device_and_optimizer_are_refused() -> None:
    with pytest.raises(DeviceError, match="no device 'tpu': choose cpu, b200"):
        capture(mlp(), (batch(),), device="tpu")
    with pytest.raises(CaptureError, match=r"unknown optimizer 'lion'.*adamw"):
        capture(mlp(), (batch(),), optimizer="lion")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CaptureError, match=r"unknown optimizer 'adam'.*adamw two, as Adam does"):
        capture(mlp(), (batch(),), optimizer="adam")  # pyright: ignore[reportArgumentType]


class WordCache:
    """What models that generate text keep for the next word."""

    def __init__(self, x: torch.Tensor) -> None:
        self.keys = x


class Generates(nn.Linear):
    def forward(self, input: torch.Tensor, use_cache: bool = True) -> dict[str, Any]:
        made = super().forward(input)
        return {"logits": made, "cache": WordCache(made)} if use_cache else {"logits": made}


def test_a_cache_that_is_to_be_returned_is_refused_with_its_switch() -> None:
    model, args = Generates(4, 4), (torch.ones(2, 4),)
    with pytest.raises(CaptureError, match=r"pass use_cache=False.*result\['cache'\].* WordCache"):
        capture(model, args, outputs=("logits", "cache"))
    assert capture(model, args, {"use_cache": False}).n_forward


def test_a_forward_hook_that_a_plan_does_not_know_is_refused() -> None:
    model, module, args = rewritten("plain")
    handle = model.body[1].register_forward_hook(lambda *_: None)  # pyright: ignore
    with pytest.raises(RewriteError, match=r"submodule body\.1 \(GELU\).*capture and solve again"):
        module(*args)
    handle.remove()
    module(*args).backward()


def test_another_batch_is_refused() -> None:
    _, module, args = rewritten("plain")
    x = args[0]
    for other, text in [
        ((x[:3],), r"args\[0\] = float32\[128, 64\] on cpu and is called with float32\[3, 64\]"),
        ((x.double(),), "float64"),
        ((torch.empty_strided((BATCH, WIDTH), (1, BATCH)),), "strides"),
        ((x.clone().requires_grad_(),), "requires_grad"),
        ((x, x), "planned for arguments"),
        ((3,), "is called with 3"),
    ]:
        with pytest.raises(RewriteError, match=text):
            module(*other)


def test_each_fact_that_differs_has_its_own_way_out() -> None:
    _, module, (x,) = rewritten("plain")
    for other, way in [
        (x[:3], "drop or pad the last batch"),
        (x[None], "as many dimensions"),
        (x.long(), r"pass it \.to\(torch\.float32\)"),
        (x.to("meta"), r"pass it \.to\('cpu'\)"),
        (torch.empty_strided((BATCH, WIDTH), (1, BATCH)), r"pass it \.contiguous\(\)"),
        (x.clone().requires_grad_(), r"pass \.detach\(\) of it"),
        (3, "pass a tensor there, as at capture"),
    ]:
        with pytest.raises(SignatureError, match=way) as caught:
            module(other)
        assert ("last batch" in str(caught.value)) == (way == "drop or pad the last batch")
    for more, text in [
        (((x, x), {}), r"call it as at capture.* is called with args\[1\]"),
        (((x,), {"mask": x}), r"is called with kwargs\['mask'\]"),
        (((), {"x": x}), r"is called with kwargs\['x'\], without args\[0\]"),
    ]:
        with pytest.raises(SignatureError, match=text):
            module(*more[0], **more[1])


def test_an_input_whose_gradient_is_planned_has_to_require_one() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    graph = capture(model, (x.clone().requires_grad_(),))
    module = rewrite(model, schedule_of(graph, "store_all"))
    with pytest.raises(SignatureError, match=r"call \.requires_grad_\(\) on it"):
        module(x)


def test_another_python_argument_is_refused() -> None:
    model, args, kwargs, loss_fn, target = make("nested_outputs_and_kwargs")
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    module = rewrite(model, schedule_of(graph, "store_all"))
    text = r"(?s)a plan holds for one value.*kwargs\['scale'\] = 2.0 and is called with 3.0"
    with pytest.raises(RewriteError, match=text):
        module(*args, **{**kwargs, "scale": 3.0})


def test_a_missing_target_is_asked_for() -> None:
    model, args, _, loss_fn, target = make("loss_function_with_target")
    graph = capture(model, args, loss_fn=loss_fn, target=target)
    module = rewrite(model, schedule_of(graph, "store_all"))
    with pytest.raises(RewriteError, match=r"call it with target=\.\.\."):
        module(*args)


def test_double_backward_is_refused() -> None:
    _, module, args = rewritten("plain")
    with pytest.raises(RewriteError, match=r"double backward through the rewritten Scalar"):
        torch.autograd.grad(module(*args), list(module.parameters()), create_graph=True)


TRANSPOSED = nn.Parameter(torch.ones(WIDTH, WIDTH).t())


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def switch_mode(model: nn.Module) -> None:
    next(model.children()).eval()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, r"body\.0\.weight of Scalar was trained .* is frozen now"),
        (lambda model: model.double(), r"body\.0\.weight of Scalar was torch\.float32"),
        (
            lambda model: model.register_buffer("more", torch.ones(1)),
            "more of Scalar was missing .* is there now",
        ),
        (lambda model: delattr(model.body[2], "bias"), r"body\.2\.bias .* is missing now"),
        (lambda model: setattr(model.body[2], "bias", None), r"body\.2\.bias .* is missing now"),
        (
            lambda model: setattr(model.body[2], "weight", TRANSPOSED),
            r"body\.2\.weight .* of strides \[64, 1\] .* strides \[1, 64\] now",
        ),
        (
            lambda model: model.body.__setitem__(1, nn.ReLU()),
            "a submodule of Scalar was one object .* is another one now",
        ),
        (switch_mode, r"submodule body .* in training mode"),
    ],
)
def test_a_changed_module_is_refused(change: Callable[[nn.Module], None], text: str) -> None:
    model, module, args = rewritten("plain")
    change(model)
    with pytest.raises(RewriteError, match=text):
        module(*args)


def test_another_autocast_state_is_refused() -> None:
    _, module, args = rewritten("plain")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            RewriteError, match=r"autocast of Scalar was off .* is torch\.bfloat16 on cpu now"
        ),
    ):
        module(*args)


def test_a_replaced_constant_is_refused() -> None:
    model, module, args = rewritten("constant_attribute")
    model.table = torch.zeros(WIDTH)
    with pytest.raises(RewriteError, match="attribute table"):
        module(*args)


def test_a_plan_for_another_model_is_refused_with_the_first_difference() -> None:
    model, args, *_ = make("plain")
    schedule = schedule_of(capture(model, args), "store_all")
    with pytest.raises(ScheduleError, match=r"input 0 was args\[0\]: float32\[128, 64\]"):
        rewrite(model, schedule, (args[0][:5],))
    with pytest.raises(ScheduleError, match="made for another graph, op "):
        rewrite(make("dropout")[0], schedule, args)
    with pytest.raises(RewriteError, match="was not captured in this process"):
        rewrite(make("plain")[0], schedule)


def test_edits_of_a_rewritten_module_are_refused() -> None:
    model, module, _ = rewritten("plain")
    attempts: list[Callable[[], Any]] = [
        lambda: setattr(module, "graph", torch.fx.Graph()),
        module.recompile,
    ]
    for attempt in attempts:
        with pytest.raises(RewriteError):
            attempt()
    with pytest.raises(CaptureError, match="already follows a plan"):
        rewrite(module, module.schedule)
    assert isinstance(copy.deepcopy(model), Scalar)
    assert isinstance(module, RematModule)


def test_a_number_that_forward_changes_is_refused_with_its_line() -> None:
    class Counter(Branching):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.inner(x)
            return self.last.mean()

    model = Counter()
    with pytest.raises(CaptureError, match=r"sets attribute calls to 1 \(.*test_refusals\.py:\d+"):
        capture(model, (batch(),))
    assert model.calls == 0
    assert not hasattr(model, "last")


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).square().mean()


def test_what_a_cpu_graph_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"(?s)nn\.LSTM on CPU.*body.*nn\.LSTMCell"):
        capture(LastOf(nn.LSTM(WIDTH, WIDTH)), (torch.randn(5, 2, WIDTH),))
    with pytest.raises(CaptureError, match=r"sparse=False.*module embedding .*test_refusals"):
        capture(SparseGradient(), (torch.arange(4),))


class LastOf(Branching):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0].square().mean()


def test_an_lstm_is_planned_without_its_fused_form() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        model, x = LastOf(nn.LSTM(WIDTH, WIDTH)), torch.randn(5, 2, WIDTH)
        graph = capture(model, (x,))
        module = rewrite(model, schedule_of(graph, "chen_sqrt"))
        assert check(model, module, (x,), steps=1).differences == ()


def test_a_weight_that_is_no_longer_tied_is_refused() -> None:
    model, args, *_ = make("tied_under_three_names")
    module = rewrite(model, schedule_of(capture(model, args), "store_all"))
    module(*args)
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    with pytest.raises(RewriteError, match=r"second\.weight .* was tied to first\.weight"):
        module(*args)
