"""`remat sweep`, by one solver and by several; pins and the price of a GiB."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import remat as api
from remat.analysis.budget_sweep import price_text
from remat.analysis.compare import DEFAULT_SOLVERS
from remat.cli.sweep import asked_budgets
from remat.graph_capture.errors import BudgetError, SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.budgets.front import Front, GibPrice
from remat.solver.budgets.sweep import least_peak, price_of_gib
from tests.graphs import with_modules
from tests.models import make
from tests.remat.cli.conftest import Remat
from tests.solver.graphs.random_graphs import chain, gpt_like

QUICK = ("--time-limit", "600")
COMPARED = ("--solver", "msps", "--solver", "full", *QUICK)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    path.write_bytes(with_modules(chain(12), 2).to_json())
    return str(path)


def test_sweep_prints_a_row_for_each_budget(remat: Remat, graph: str) -> None:
    done = remat("sweep", graph, "--budgets", "4", *QUICK, "--solver", "cut")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].split() == ["budget", "peak", "overhead", "bound", "gap", "solver", "seconds"]
    assert [line.split()[-2] for line in lines[3:]] == ["cut"] * 4
    assert " 0.0 % " in lines[6]


def test_several_solvers_stand_side_by_side_at_each_budget(
    remat: Remat, graph: str, tmp_path: Path
) -> None:
    path = tmp_path / "fronts.json"
    words = ("sweep", graph, "--budgets", "4", *QUICK, "--solver", "cut", "--solver")
    done = remat(*words, "dummy")
    assert done.exit_code == 2
    assert "unknown solver 'dummy'" in done.stderr
    done = remat(*words, "chen_sqrt", "-o", str(path))
    assert done.exit_code == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if "%" in line]
    assert names == ["unmodified", "cut", "chen_sqrt", "bound"]
    said = json.loads(remat(*words, "chen_sqrt", "--json").stdout)
    assert list(said["fronts"]) == list(json.loads(path.read_text())) == ["cut", "chen_sqrt"]
    for front, row in zip(said["fronts"].values(), said["rows"][1:], strict=True):
        overheads = {budget: result["overhead"] for budget, result in front["points"]}
        fitting = [cell for cell in row["cells"] if cell["fits"]]
        assert fitting
        assert all(cell["overhead"] == overheads[cell["budget_bytes"]] for cell in fitting)


def test_sweep_keeps_a_front_that_reads_back(remat: Remat, graph: str, tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    words = ("--budgets", "60%,100%", "--solver", "cut", *QUICK, "-o", str(path), "--json")
    done = remat("sweep", graph, *words)
    assert done.exit_code == 0, done.stderr
    front = Front.from_json(path.read_bytes())
    said = json.loads(done.stdout)["fronts"]["cut"]
    assert [point[0] for point in said["points"]] == [b for b, _ in front.points]
    assert front.points[1].result.overhead == 0
    assert front.points[0].result.overhead > 0


def test_a_kept_plan_is_compared_from_its_file_alone(remat: Remat, tmp_path: Path) -> None:
    plan, words = str(tmp_path / "plan.json"), ("--budget", "70%", "--solver", "msps")
    solved = remat("run", remat.gpt, "--no-check", *words, "-o", plan)
    assert solved.exit_code == 0, solved.stderr
    said = json.loads(remat("sweep", plan, *COMPARED, "--json").stdout)
    assert [row["solver"] for row in said["rows"]] == ["unmodified", "this plan", "msps", "full"]
    assert len(said["bounds"]) == 4
    mine = [bound["budget_bytes"] for bound in said["bounds"]].index(
        json.loads(Path(plan).read_text())["schedule"]["budget_bytes"]
    )
    cells = {row["solver"]: row["cells"][mine] for row in said["rows"]}
    assert cells["this plan"]["time_us"] == cells["msps"]["time_us"]


@pytest.mark.parametrize("columns", [60, 100])
def test_many_budgets_fit_a_narrow_terminal(remat: Remat, columns: int) -> None:
    budgets = "90%,85%,80%,75%,70%,65%,60%"
    done = remat("sweep", remat.gpt, *COMPARED, "--budgets", budgets, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert done.stdout.count("unmodified ") == (5 if columns == 60 else 3)
    for budget in budgets.split(","):
        assert budget in done.stdout


def test_refusals_come_before_the_model_is_loaded(remat: Remat) -> None:
    for words, says in (
        (["--budgets", "8 gigs"], "unknown unit 'gigs'"),
        (["--solver", "cutt"], "unknown solver 'cutt': did you mean cut?"),
    ):
        refused = remat("sweep", "no_such_file.py:factory", *words)
        assert refused.exit_code == 2
        assert says in refused.stderr


def test_the_usual_solvers_and_rules_have_one_name(remat: Remat, graph: str) -> None:
    done = remat("sweep", graph, "--budgets", "100%", "--solver", "usual", *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["solver"] for row in rows] == ["unmodified", *DEFAULT_SOLVERS]


@pytest.mark.slow
def test_the_graph_of_a_plan_is_swept_and_solved_anew(remat: Remat, tmp_path: Path) -> None:
    plan, alone = tmp_path / "plan.json", tmp_path / "schedule.json"
    words = ("--budget", "70%", "--solver", "cut", *QUICK)
    assert remat("run", remat.gpt, "--no-check", *words, "-o", str(plan)).exit_code == 0
    done = remat("sweep", str(plan), "--budgets", "60%,80%", "--solver", "cut", *QUICK)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert remat("run", str(plan), *words, "-o", str(alone)).exit_code == 0
    done = remat("sweep", str(alone))
    assert done.exit_code == 2
    assert "is only a schedule" in done.stderr


def test_a_sweep_where_nothing_fits_ends_with_three(remat: Remat, graph: str) -> None:
    done = remat("sweep", graph, "--budgets", "1KiB,2KiB", "--solver", "chen_sqrt")
    assert done.exit_code == 3
    assert "no schedule was found at any budget" in done.stderr
    assert done.stdout.count("none found") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budgets", "0"], "budgets '0': ask for 1 or more"),
        (["--budgets", "50%,60"], "Write 60%, 60MiB or 60GiB"),
        (["--jobs", "0"], "jobs must be 1 or more, or -1 for every core, not 0"),
        (["--solver", "cutt"], "did you mean cut?"),
    ],
)
def test_bad_sweeps_are_refused_before_anything_runs(
    remat: Remat, words: list[str], says: str
) -> None:
    refused = remat("sweep", "no_such_file.py:factory", *words)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_budgets_as_they_are_written() -> None:
    assert asked_budgets("7") == 7
    assert asked_budgets("50%, 2GiB,min") == ["50%", "2GiB", "min"]
    with pytest.raises(BudgetError, match="ask for 1 or more"):
        asked_budgets("-3")


def test_pins_on_the_command_line(remat: Remat, graph: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = ("--solver", "cut", *QUICK, "--keep", "*.norm", "--recompute", "*.attn")
    done = remat("run", graph, "--budget", "90%", *words, "-o", str(plan))
    assert done.exit_code == 0, done.stderr
    schedule = Schedule.from_json(plan.read_bytes())
    assert schedule.options["keep"] == "*.norm"
    real = TrainingGraph.from_json(Path(graph).read_bytes())
    runs = schedule.computations()
    assert all(runs[op.name] == 1 for op in real.ops if op.module.endswith(".norm"))
    least = remat("run", graph, "--budget", "min", *words, "--json")
    found = json.loads(least.stdout)
    assert found["plan"]["predicted_peak_bytes"] <= found["budget_bytes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--keep", "*.atn"], "keep '*.atn' matches no module of a forward op: did you mean"),
        (["--keep", "blocks.0", "--recompute", "*.norm"], "is pinned by both"),
        (["--recompute", "nothing"], "Modules are blocks.0.norm, blocks.0.attn"),
    ],
)
def test_bad_pins_are_refused_with_what_is_there(
    remat: Remat, graph: str, words: list[str], says: str
) -> None:
    refused = remat("run", graph, "--budget", "80%", *words)
    assert refused.exit_code == 2
    assert says in refused.stderr
    said = json.loads(remat("run", graph, "--budget", "80%", *words, "--json").stdout)
    assert said["error"]["type"] == "SolverError"


def test_the_price_of_a_gib_is_told_when_asked(remat: Remat, graph: str) -> None:
    words = ("run", graph, "--budget", "70%", "--solver", "cut", *QUICK)
    assert "price" not in remat(*words).stdout
    done = remat(*words, "--price-of-gib")
    assert re.search(r"price +[\d.]+ [KM]iB more \(5 % of the peak; .*\) saves ", done.stdout)
    price = json.loads(remat(*words, "--price-of-gib", "--json").stdout)["price_of_gib"]
    assert price["saved_us"] > 0
    assert price["cost_us"] > 0
    assert "price_of_gib" not in json.loads(remat(*words, "--json").stdout)


@pytest.mark.slow
def test_run_takes_pins_and_prices(remat: Remat) -> None:
    words = ("--budget", "80%", "--solver", "cut", "--time-limit", "600", "--recompute", "*.attn")
    done = remat("run", remat.gpt, *words, "--price-of-gib", columns=200)
    assert done.exit_code == 0, done.stderr
    assert "gradients bit-identical" in done.stdout
    assert "as much less costs" in done.stdout
    assert remat("run", remat.gpt, "--budget", "80%", "--keep", "blocks.9").exit_code == 2


def test_prices_in_words() -> None:
    price = GibPrice(2**31, 2**30, time_us=200_000, more_us=190_000, less_us=230_000)
    assert price_text(price) == (
        "1 GiB more saves 10.0 ms a step (5.0 %); as much less costs 30.0 ms (15.0 %)"
    )
    tight = GibPrice(2**31, 2**30, time_us=200_000, more_us=190_000, less_us=None)
    assert price_text(tight).endswith("with as much less no schedule is known")


def test_one_call_for_several_solvers() -> None:
    fronts = api.sweep(chain(8), ["70%", "100%"], solvers=("cut", "chen_sqrt")).fronts
    assert list(fronts) == ["cut", "chen_sqrt"]
    budgets = [[b for b, _ in front.points] for front in fronts.values()]
    assert budgets[0] == budgets[1]
    assert list(api.sweep(chain(8), 2, "cut"))[1].overhead == 0
    with pytest.raises(SolverError, match="unknown solver 'cutt'"):
        api.sweep(chain(8), solvers=["cut", "cutt"])


@pytest.mark.slow
def test_the_least_peak_by_the_short_name() -> None:
    least = least_peak(gpt_like(1), 10.0, solver="cut")
    assert least.schedule is not None
    assert price_of_gib(gpt_like(1), least, solver="cut").cost is None


def test_rematerialize_with_pins_is_exact() -> None:
    model, args, _, loss_fn, target = make("loss_function_with_target")
    module = api.rematerialize(
        model, args, loss_fn=loss_fn, target=target, budget="100%", solver="cut", recompute="*"
    )
    assert api.check(model, module, args, loss_fn=loss_fn, target=target).equal
