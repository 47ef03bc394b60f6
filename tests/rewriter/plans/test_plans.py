"""Plans made in one process and loaded in another, and what is refused."""

from __future__ import annotations

import enum
import functools
import gc
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import (
    CaptureError,
    FileError,
    PlanError,
    RewriteError,
    ScheduleError,
)
from remat.plans_at_hand import plan_of_file
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.plans.loading import EXTRA_FILE, load_plan, plan_of, read_plan, save_plan
from remat.schedules.outcome import Check
from remat.schedules.plan import KIND, PlanFile
from tests.files.kinds import plan as every_part
from tests.models import make
from tests.rows import each_nth
from tests.steps import schedules_of

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "docs" / "plan.schema.json"
WRITE_SCHEMA = "from tests.rewriter.plans.test_plans import *; SCHEMA.write_bytes(json_schema())"
"""Run with ``python -c`` from the repository's root, it writes the file anew."""

IN_ANOTHER_PROCESS = """
import json, sys
import remat
from tests.models import make
from remat.rewriter.checking.check import check

said = {}
for name in sys.argv[2:]:
    model, args, kwargs, loss_fn, target = make(name)
    fast = remat.load(f"{sys.argv[1]}/{name}.json").apply(model, loss_fn=loss_fn)
    found = check(model, fast, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    solvers = [name for name in sys.modules if name.startswith(("ortools", "remat.solver"))]
    said[name] = {"peak": found.plan_peak_bytes, "differences": found.differences,
                  "gradients": found.gradients, "solvers": solvers}
print(json.dumps(said))
"""


def planned(name: str, budget: str = "70%") -> tuple[Any, PlanFile, int]:
    """The case, its plan, and the peak that was measured where it was made."""
    model, args, kwargs, loss_fn, target = case = make(name)
    module: Any = remat.rematerialize(
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        target=target,
        budget=budget,
        solver="cut",
        check=False,
    )
    found = remat.check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    return case, plan_of(module), found.plan_peak_bytes


LOADED = ("loss_function_with_target", "transformer_layers")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PlanFile, int, Any]]:
    """Plans, their peaks here, and what was found in one other process that loads them all."""
    folder = tmp_path_factory.mktemp("plans")
    made = {name: planned(name)[1:] for name in LOADED}
    for name, (plan, _) in made.items():
        save_plan(plan, folder / f"{name}.json")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS, str(folder), *LOADED],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    return {name: (*made[name], said[name]) for name in LOADED}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_loaded_in_another_process_with_the_same_peak_and_gradients(
    name: str, elsewhere: dict[str, tuple[PlanFile, int, Any]]
) -> None:
    plan, peak_bytes, said = elsewhere[name]
    assert said["differences"] == []
    assert said["gradients"] > 0
    assert said["peak"] == peak_bytes == plan.prediction.peak_bytes
    assert said["solvers"] == []


@pytest.mark.parametrize(
    "name",
    each_nth(3, [
        "nested_outputs_and_kwargs", "tied_under_three_names", "frozen_batch_norm",
        "overwritten_buffer", "input_requires_grad", "user_checkpoint",
    ]),
)  # fmt: skip
def test_plans_of_all_kinds_of_models_read_back_equal_and_train(name: str, tmp_path: Path) -> None:
    (_, args, kwargs, loss_fn, target), plan, _ = planned(name, "90%")
    save_plan(plan, tmp_path / "plan.pt2")
    assert read_plan(tmp_path / "plan.pt2") == plan
    fresh = make(name)[0]
    again = load_plan(tmp_path / "plan.pt2", fresh, args, kwargs, loss_fn=loss_fn, target=target)
    assert plan_of(again) == plan
    found = remat.check(fresh, again, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert found.differences == ()


def test_a_plan_made_under_autocast_is_loaded_outside_of_it() -> None:
    model, args, *_ = make("plain")
    with torch.autocast("cpu", torch.bfloat16):
        module: Any = remat.rematerialize(model, args, budget="95%", solver="cut", check=False)
    loaded = load_plan(PlanFile.from_json(plan_of(module).to_json()), model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loaded(*args), model(*args))
    with pytest.raises(RewriteError, match="autocast of Scalar was"):
        loaded(*args)


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor, scale: float = 1.0, *, mode: str | None = None) -> Tensor:
        return self.body(x * scale).mean()


@functools.cache
def small_plan() -> PlanFile:
    model, x = Exported(), torch.randn(16, 8)
    graph = remat.capture(model, (x,), {"scale": float("inf"), "mode": "a\nb"})
    schedule = remat.solve(graph, "100%", solver="cut").schedule
    return plan_of(agreed_rewrite(model, schedule))


@pytest.fixture
def small() -> tuple[Exported, Tensor, PlanFile]:
    """A model and a batch of this test's own, which the one plan is for."""
    return Exported(), torch.randn(16, 8), small_plan()


def test_an_archive_holds_a_program_beside_the_plan(
    small: tuple[Exported, Tensor, PlanFile], tmp_path: Path
) -> None:
    model, x, plan = small
    path = tmp_path / "model.pt2"
    save_plan(plan, path, torch.export.export(model.eval(), (x,)))
    assert read_plan(path) == plan
    assert torch.equal(torch.export.load(path).module()(x), model(x))
    extra = {EXTRA_FILE: ""}
    torch.export.load(path, extra_files=extra)
    assert PlanFile.from_json(extra[EXTRA_FILE]) == plan
    with pytest.raises(PlanError, match=r"holds no program: name the file with \.pt2"):
        save_plan(plan, tmp_path / "plan.json", torch.export.export(model, (x,)))


def test_python_arguments_are_kept_by_value(small: tuple[Exported, Tensor, PlanFile]) -> None:
    model, x, plan = small
    assert plan.prediction is None
    loaded = load_plan(
        PlanFile.from_json(plan.to_json()), model, (x,), {"scale": float("inf"), "mode": "a\nb"}
    )
    loaded(x, scale=float("inf"), mode="a\nb")
    with pytest.raises(RewriteError, match=r"planned for kwargs\['scale'\] = inf"):
        loaded(x, scale=2.0, mode="a\nb")


def test_a_batch_of_another_shape_is_refused_at_loading_or_at_the_first_step(
    small: tuple[Exported, Tensor, PlanFile],
) -> None:
    model, x, plan = small
    kwargs = {"scale": float("inf"), "mode": "a\nb"}
    with pytest.raises(
        PlanError, match=r"the batch was args\[0\]: float32\[16, 8\] on cpu and is .*\[4, 8\]"
    ):
        load_plan(plan, model, (x[:4],), kwargs)
    with pytest.raises(
        PlanError, match=r"structure of the batch was \(args\[0\], .*mode.*\) and is \(args"
    ):
        load_plan(plan, model, (x,), {"scale": float("inf")})
    with pytest.raises(RewriteError, match=r"planned for args\[0\] = float32\[16, 8\]"):
        load_plan(plan, model)(x[:4], **kwargs)


def changed_model(change: str) -> nn.Module:
    model = Exported()
    if change == "width":
        model.body[2] = nn.Linear(8, 4)
    elif change == "dtype":
        model.to(torch.bfloat16)
    elif change == "frozen":
        model.body[0].weight.requires_grad_(False)
    elif change == "more":
        model.body.append(nn.Linear(8, 8))
    elif change == "fewer":
        model.body[2] = nn.Linear(8, 8, bias=False)
    elif change == "tied":
        model.body[2].weight = model.body[0].weight
    elif change == "eval":
        model.body[1].eval()
    elif change == "buffer":
        model.register_buffer("steps", torch.zeros(1))
    elif change == "activation":
        model.body[1] = nn.ReLU()
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("width", r"parameter body\.2\.weight was of shape \[8, 8\] and is of shape \[4, 8\]"),
        ("dtype", r"parameter body\.0\.weight was of dtype float32 and is of dtype bfloat16"),
        ("frozen", r"parameter body\.0\.weight was trained and is frozen"),
        ("more", r"parameter body\.3\.weight is new"),
        ("fewer", r"parameter body\.2\.bias is not there"),
        ("tied", r"parameter body\.2\.weight was tied to none and is tied to body\.0\.weight"),
        ("eval", r"submodule body\.1 was training mode and is eval mode"),
        ("buffer", r"buffer steps is new"),
    ],
)
def test_a_changed_model_is_refused_with_the_first_difference(
    small: tuple[Exported, Tensor, PlanFile], change: str, says: str
) -> None:
    with pytest.raises(PlanError, match=f"again with remat.plans.*: the plan does not fit, {says}"):
        load_plan(small[2], changed_model(change))


def test_a_model_that_computes_something_else_is_refused_by_its_graph(
    small: tuple[Exported, Tensor, PlanFile],
) -> None:
    with pytest.raises(ScheduleError, match=r"op 2 was .*gelu.* and is .*relu"):
        load_plan(small[2], changed_model("activation"))


def test_another_class_and_a_rewritten_module_are_refused(
    small: tuple[Exported, Tensor, PlanFile],
) -> None:
    model, _, plan = small
    with pytest.raises(PlanError, match="the model's class was Exported and is Linear"):
        load_plan(plan, nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="already follows a plan"):
        load_plan(plan, load_plan(plan, model))
    with pytest.raises(PlanError, match="a Exported follows no plan"):
        plan_of(model)


def test_of_a_cache_it_is_the_plan_that_was_used_last() -> None:
    model, x = Exported(), torch.randn(16, 8)
    cache = remat.rematerialize(model, budget="100%", solver="cut", check=False)
    with pytest.raises(PlanError, match="train a step first: this cache has made no plan yet"):
        plan_of(cache)
    for rows in (16, 8, 16):
        cache(x[:rows])
    plan = plan_of(cache)
    assert plan.schedule == schedules_of(cache)[-1]
    assert plan.schedule.inputs[0] == "args[0]: float32[16, 8] on cpu"
    assert torch.equal(load_plan(plan, model)(x), model(x))


def edited(plan: PlanFile, **changes: Any) -> PlanFile:
    return msgspec.structs.replace(plan, **changes)


def test_another_torch_is_refused_another_build_of_it_is_not(
    small: tuple[Exported, Tensor, PlanFile],
) -> None:
    model, _, plan = small
    older = edited(plan, versions=msgspec.structs.replace(plan.versions, torch="2.10.0+cpu"))
    with pytest.raises(PlanError, match=r"remat\.plans.*torch was 2\.10\.0\+cpu and is "):
        load_plan(older, model)
    public = str(torch.__version__).partition("+")[0]
    versions = msgspec.structs.replace(plan.versions, torch=f"{public}+cu126")
    load_plan(edited(plan, versions=versions), model)


def test_another_device_is_refused_and_another_machine_is_warned_about(
    small: tuple[Exported, Tensor, PlanFile],
) -> None:
    model, _, plan = small
    with pytest.raises(PlanError, match="the device was h100 and is cpu"):
        load_plan(edited(plan, device="h100"), model)
    with pytest.warns(UserWarning, match="made for another one and is loaded on") as warned:
        load_plan(edited(plan, title="another one"), model)
    assert warned[0].filename == __file__


def test_the_loss_function_is_given_again() -> None:
    (model, *_), plan, _ = planned("loss_function_with_target", "100%")
    assert plan.loss_fn == "CrossEntropyLoss"
    with pytest.raises(PlanError, match=r"remat\.load\(path\)\.apply\(model, loss_fn=CrossEn"):
        load_plan(plan, model)
    with pytest.raises(PlanError, match="loss function was CrossEntropyLoss and is MSELoss"):
        load_plan(plan, model, loss_fn=nn.MSELoss())
    with pytest.raises(PlanError, match="loss function was none and is mse_loss"):
        load_plan(planned("plain", "100%")[1], make("plain")[0], loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is cut short: it is not JSON"),
        (b'{"model": "Lin', "is cut short: it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[1, 2]", "its kind is not 'remat plan'"),
        (b'{"ops": []}', "its kind is not 'remat plan'"),
        (
            b'{"steps": [], "graph_hash": ""}',
            "it is only a schedule, which does not know its batch",
        ),
        (
            b'{"kind": "remat plan", "schema_version": 7}',
            "schema version 7, and this release reads 1",
        ),
        (b'{"kind": "remat plan", "schema_version": 1}', "not a plan of this release .*missing"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(PlanError, match=f"plan.json .*{says}"):
        read_plan(path)


def test_archives_that_hold_no_plan(
    small: tuple[Exported, Tensor, PlanFile], tmp_path: Path
) -> None:
    model, x, plan = small
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    with pytest.raises(PlanError, match=r"put a plan there with plan.save"):
        read_plan(path)
    save_plan(plan, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(PlanError, match=r"is not a \.pt2 archive, or is cut short"):
        read_plan(path)


@pytest.mark.parametrize("with_program", [False, True])
def test_an_archive_that_a_full_disk_cuts_short(
    small: tuple[Exported, Tensor, PlanFile], tmp_path: Path, with_program: bool
) -> None:
    """Its writer ends its file when it is destroyed, where an error would end the process."""
    model, x, plan = small
    program = torch.export.export(model, (x,)) if with_program else None
    path, full = tmp_path / "model.pt2", tmp_path / "full.pt2"
    full.symlink_to("/dev/full")
    with pytest.raises(FileError, match=r"cannot write .*full\.pt2: No space left on device"):
        save_plan(plan, full, program)
    save_plan(plan, path, program)
    old = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, hard))
    try:
        with pytest.raises(FileError, match=r"cannot write .*model\.pt2: File too large"):
            save_plan(plan, path, program)
        gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, heard)
    assert path.read_bytes() == old
    assert sorted(one.name for one in tmp_path.iterdir()) == ["full.pt2", "model.pt2"]


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, mark: object) -> Tensor:
        return self.linear(x).sum()


class Color(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (Color.RED, r"args\[1\] as numbers.*is a Color, which a plan file cannot hold"),
        (Pair(1, 2), "it has a container that a plan file cannot hold"),
    ],
)
def test_a_batch_that_no_file_can_hold_is_refused_when_the_plan_is_made(
    mark: object, says: str
) -> None:
    model, args = Marked(), (torch.ones(1, 2), mark)
    graph = remat.capture(model, args)
    module = agreed_rewrite(model, remat.solve(graph, "100%", solver="cut").schedule)
    with pytest.raises(PlanError, match=says):
        plan_of(module)


def test_a_batch_in_a_file_that_cannot_be_read(small: tuple[Exported, Tensor, PlanFile]) -> None:
    model, _, plan = small
    batch = msgspec.structs.replace(plan.batch, tree="[1, {}]")
    with pytest.raises(PlanError, match="cannot read the batch in the plan file"):
        load_plan(edited(plan, batch=batch), model)


def test_a_plan_of_an_older_release_is_read() -> None:
    """Without what a check showed, and how far the proof reaches."""
    made = every_part()
    root = json.loads(made.to_json())
    del root["check"], root["unchecked"], root["prediction"]["status"], root["prediction"]["order"]
    prediction = msgspec.structs.replace(made.prediction, status=None, order=None)
    older = edited(made, check=None, prediction=prediction)
    assert PlanFile.from_json(json.dumps(root)) == older
    assert plan_of_file(older).status == "feasible"


def test_more_equal_gradients_than_there_are_is_refused() -> None:
    root = json.loads(every_part().to_json())
    root["check"]["gradients"] = root["check"]["gradients_total"] + 1
    with pytest.raises(PlanError, match="its check has a figure that cannot be"):
        PlanFile.from_json(json.dumps(root))


def test_what_json_cannot_hold_is_left_out_of_a_check() -> None:
    """Times are not a number where none was taken, and so is how far off what is no tensor is."""
    nan = float("nan")
    check = Check(True, False, True, True, 1, 2, 0, 9, nan, nan, ("w",), distances=(nan,))
    made = edited(every_part(), check=check.as_kept())
    again = PlanFile.from_json(made.to_json())
    assert again == made
    assert again.check is not None
    assert (again.check.baseline_step_us, again.check.differences) == (0.0, ("w",))


def json_schema() -> bytes:
    """The JSON schema of plan files, as `SCHEMA` holds it."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(PlanFile)), indent=2) + b"\n"


def test_the_published_schema_is_current(small: tuple[Exported, Tensor, PlanFile]) -> None:
    published = SCHEMA.read_bytes()
    assert published == json_schema(), f'write it anew: python -c "{WRITE_SCHEMA}"'
    schema = json.loads(published)
    fields = schema["$defs"]["PlanFile"]["properties"]
    assert fields.keys() == json.loads(small[2].to_json()).keys()
    assert fields["kind"]["default"] == KIND
