"""What is free: the least of the machine, the control groups and the limits of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from remat import checks
from remat.graph_capture.costs import step_time
from remat.graph_capture.devices import memory
from remat.graph_capture.devices.memory import free_bytes, is_out_of_memory
from remat.graph_capture.errors import BudgetError
from tests.fake_cuda import FakeCuda, cuda
from tests.solver.graphs.random_graphs import chain

__all__ = ["cuda"]

GIB = 1 << 30
resource = pytest.importorskip("resource")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free, and no limits."""
    (tmp_path / "meminfo").write_text(f"MemAvailable:   {8 * GIB // 1024} kB\n")
    (tmp_path / "status").write_text("VmSize:\t 1048576 kB\nVmData:\t 524288 kB\n")
    (tmp_path / "cgroup").write_text("")
    for name, file in (("MEMINFO", "meminfo"), ("STATUS", "status"), ("CGROUP_OF_SELF", "cgroup")):
        monkeypatch.setattr(memory, name, tmp_path / file)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    return tmp_path


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_without_limits_it_is_what_the_machine_has(groups: Path) -> None:
    assert free_bytes() == 8 * GIB


def test_a_group_of_version_2_and_those_above_it_count(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/job/step\n")
    group(groups / "groups/job/step", {"memory.max": "max", "memory.current": "5"})
    assert free_bytes() == 8 * GIB
    group(
        groups / "groups/job",
        {
            "memory.max": str(3 * GIB), "memory.current": str(2 * GIB),
            "memory.stat": f"anon 7\ninactive_file {GIB // 2}\nactive_file 9",
        },
    )  # fmt: skip
    assert free_bytes() == 3 * GIB // 2


def test_in_a_container_the_root_has_its_own_group(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/\n")
    group(groups / "groups", {"memory.max": str(2 * GIB), "memory.current": str(GIB)})
    assert free_bytes() == GIB


def test_a_group_of_version_1_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("5:cpu:/\n4:memory:/docker/4f\n0::/\n")
    files = {"memory.limit_in_bytes": str(2 * GIB), "memory.usage_in_bytes": str(GIB)}
    group(groups / "groups/memory", files)
    assert free_bytes() == GIB
    more = {"memory.usage_in_bytes": str(2 * GIB), "memory.stat": "total_inactive_file 4096"}
    group(groups / "groups/memory/docker/4f", files | more)
    assert free_bytes() == 4096


def test_nothing_is_free_beyond_a_limit(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/\n")
    group(groups / "groups", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert free_bytes() == 0


@pytest.mark.parametrize(("limit", "used_bytes"), [("RLIMIT_AS", GIB), ("RLIMIT_DATA", GIB // 2)])
def test_a_limit_of_the_process_counts_beyond_what_is_mapped(
    groups: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used_bytes: int
) -> None:
    set_bytes = {getattr(resource, limit): (2 * GIB, 2 * GIB)}
    endless = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: set_bytes.get(which, endless))
    assert free_bytes() == 2 * GIB - used_bytes


def test_where_nothing_says_what_is_free_auto_is_refused_and_no_step_is_run(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMINFO", groups / "gone")
    monkeypatch.setattr(os, "sysconf_names", {"SC_PAGE_SIZE": 30, "SC_PHYS_PAGES": 85})
    with pytest.raises(BudgetError, match="does not say what memory is free; give a size"):
        free_bytes()
    assert not step_time._has_room(1, "cpu")
    graph = chain(2)
    assert checks.why_unchecked(graph).startswith("the plan is not checked against the unmodified")


def test_a_system_without_a_list_of_numbers_says_nothing(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMINFO", groups / "gone")
    monkeypatch.delattr(os, "sysconf_names")
    with pytest.raises(BudgetError):
        free_bytes()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_known_by_its_error(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(2, "no"), ValueError()])
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_of_a_cuda_device_torchs_own_share_counts(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_bytes = free_bytes("cuda:0")
    assert whole_bytes >= 10_000
    reserved_bytes = torch.cuda.memory_reserved("cuda:0")
    part = (reserved_bytes + 2_000) / 80_000
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: part)
    assert free_bytes("cuda:0") == pytest.approx(whole_bytes - 8_000, abs=1)
