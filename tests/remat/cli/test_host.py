"""`--host` and `--nvme`: on the verbs that plan, on the screen and in JSON; what doctor knows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from remat.analysis.plan_figures import offloaded
from remat.cli.sweep import asked_hosts
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.job.pipeline import planned_report
from remat.job.request import Request
from remat.job.screen import report_json, run_screen
from remat.progress import Stopwatch
from tests.copying import copying_chain, copying_result
from tests.files.kinds import plan
from tests.fixed_costs import CLOCKED, LINK, patched
from tests.remat.cli.conftest import Remat

GIB = 1 << 30


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    path.write_bytes(msgspec.structs.replace(copying_chain(), device="h100").to_json())
    return str(path)


def test_a_capture_has_links(remat: Remat, tmp_path: Path) -> None:
    kept = tmp_path / "graph.json"
    words = ("--host", "1MiB", "--nvme", f"{tmp_path}:2MiB", "-o", str(kept))
    done = remat("show", remat.gpt, "--as", "graph", *words, columns=200)
    assert done.exit_code == 0, done.stderr
    assert "host 1.00 MiB: 0.9 of 1 GB/s to a folder and 1 back" in done.stdout
    links = TrainingGraph.from_json(kept.read_text()).links
    assert links is not None
    assert (links.host_bytes, links.nvme_bytes) == (1 << 20, 2 << 20)


def test_a_run_is_planned_with_a_host(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--budget", "100%", "--host", "1MiB", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["offload"] is None  # all fits, so that nothing is copied


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--host", "much"), "host 'much' cannot be read"),
        (("--host", "auto", "--device", "h100"), "'auto' means what this machine has free"),
        (("--nvme", "/tmp:1GiB"), "lies below the host"),
        (("--host", "1KiB", "--nvme", "/no/where:1KiB"), "/no/where is not a folder"),
        (("--host", "9000TiB"), "is more than the"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "largest-batch", "sweep", "show", "report"])
def test_bad_input_is_one_line(remat: Remat, verb: str, words: tuple[str, ...], says: str) -> None:
    out = ("-o", "page.html") if verb == "report" else ()
    done = remat(verb, "no/such/file.py", *words, *out)
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_kept_graph_gets_the_links_of_its_device(
    remat: Remat, graph: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.json"
    one = TrainingGraph.from_json(Path(graph).read_text())
    bare.write_bytes(msgspec.structs.replace(one, links=None).to_json())
    words = ("--budget", "100%", "--solver", "revolve")
    done = remat("run", str(bare), *words, "--host", "9000TiB", "--json")
    assert done.exit_code == 0, done.stderr
    elsewhere = msgspec.structs.replace(one, links=None, device="cpu")
    bare.write_bytes(elsewhere.to_json())
    done = remat("run", str(bare), *words, "--host", "1GiB")
    assert done.exit_code == 2
    assert "measure the links of" in done.stderr


def test_a_plan_has_its_own_links(remat: Remat, tmp_path: Path) -> None:
    graph = copying_chain()
    schedule = copying_result(graph).schedule
    assert schedule is not None
    path = tmp_path / "plan.json"
    made = msgspec.structs.replace(plan(), schedule=schedule, graph=graph, prediction=None)
    path.write_bytes(made.to_json())
    done = remat("show", str(path), "--json")
    assert done.exit_code == 0, done.stderr
    assert '"offload"' in done.stdout
    done = remat("show", str(path), "--host", "1GiB")
    assert done.exit_code == 2
    assert "leave out --host 1GiB, as a plan has its own links" in done.stderr


def test_the_screen_and_json_say_what_is_copied() -> None:
    graph = copying_chain()
    report, _ = planned_report(graph, Request(), Stopwatch(), copying_result(graph))
    text = io.StringIO()
    Console(file=text, width=120).print(run_screen(report))
    lines = [line.split(maxsplit=1)[0] for line in text.getvalue().splitlines() if line.strip()]
    assert [one for one in lines if one in ("host", "copies", "waits", "slower", "links")] == [
        "host", "copies", "waits", "slower", "links"
    ]  # fmt: skip
    said = report_json(report)["offload"]
    assert (said["host_bytes"], said["stall_us"], said["source"]) == (100, 9.0, "a test")
    assert [one["link"] for one in said["links"]] == ["d2h", "h2d"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", {}),
        ("auto", {"auto": 1}),
        ("8GiB", {"8GiB": 8 * GIB}),
        ("0, 8GiB,16GiB", {"0": 0, "8GiB": 8 * GIB, "16GiB": 16 * GIB}),
    ],
)
def test_hosts_of_a_sweep(text: str, hosts: dict[str, int]) -> None:
    assert asked_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,auto", "host 'auto' cannot be read: write it like 8GiB, or several with 0 for none"),
        ("1GiB,1024MiB", "give each host size once"),
    ],
)
def test_hosts_that_cannot_be_swept(text: str, says: str) -> None:
    with pytest.raises(BudgetError) as error:
        asked_hosts(text)
    assert says in str(error.value)


def test_a_sweep_goes_over_sizes_of_the_host(remat: Remat, graph: str) -> None:
    words = ("--budgets", "90%,100%", "--solver", "revolve", "--time-limit", "600")
    done = remat("sweep", graph, *words, "--host", "0,8GiB,16GiB", "--json")
    assert done.exit_code == 0, done.stderr
    fronts = json.loads(done.stdout)["fronts"]
    assert list(fronts) == ["revolve, host 0", "revolve, host 8GiB", "revolve, host 16GiB"]
    budgets = {tuple(point[0] for point in front["points"]) for front in fronts.values()}
    assert len(budgets) == 1
    done = remat("sweep", graph, *words, "--host", "8GiB", "--json")
    assert list(json.loads(done.stdout)["fronts"]) == ["revolve"]


def test_a_profile_has_links(remat: Remat, tmp_path: Path) -> None:
    kept = tmp_path / "profile.json"
    done = remat("profile", remat.gpt, "--nvme", str(tmp_path), "-o", str(kept), columns=200)
    assert done.exit_code == 0, done.stderr
    assert "host: 1.25 GB/s to a folder and 1.25 back; at once 1 and 1" in done.stdout
    assert f"nvme: 1.25 GB/s to {tmp_path}" in done.stdout
    assert json.loads(kept.read_text())["links"]["host"]["down"] == msgspec.to_builtins(LINK)
    done = remat("profile", remat.gpt, "--nvme", str(tmp_path / "gone"))
    assert done.exit_code == 2
    assert "is not a folder" in done.stderr


def test_doctor_says_which_links_it_knows(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remat.graph_capture.costs import measuring
    from remat.graph_capture.devices import links

    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("REMAT_OFFLOAD", str(tmp_path))
    done = remat("doctor", columns=200)
    assert f"files in {tmp_path}" in done.stdout
    assert "none measured yet" in done.stdout
    monkeypatch.setattr(links, "REPEATS", 1)
    with patched({(measuring, "measured_pair"): CLOCKED[measuring, "measured_pair"]}):
        measuring.measured_pair("cpu")
    known = json.loads(remat("doctor", "--json").stdout)["links"]
    assert list(known) == [f"cpu, host: {tmp_path}"]


def test_largest_batch_has_a_host(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.cli import largest_batch

    words = ("--budget", "8GiB", "--vary", "batch", "--most", "4", "--no-check", "--device", "h100")
    done = remat("largest-batch", remat.gpt, *words, "--host", "1GiB", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["offload"] is None
    graph = copying_chain()
    moved = offloaded(graph, copying_result(graph).schedule)
    monkeypatch.setattr(largest_batch, "offloaded", lambda *_: moved)
    done = remat("largest-batch", remat.gpt, *words, "--host", "1GiB")
    assert "waits the device waits 9.0 us for copies" in " ".join(done.stdout.split())


def test_a_request_has_tiers() -> None:
    assert Request().tiers() is None
    tiers = Request(device="h100", host="2GiB", nvme="/mnt/x:1GiB").tiers()
    assert tiers is not None
    assert tiers == (2 * GIB, GIB, "/mnt/x")
