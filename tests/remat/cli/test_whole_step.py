"""`remat run --microbatches`: a whole optimizer step, planned from the command line."""

from __future__ import annotations

import json

import pytest

from tests.paths import ROOT
from tests.remat.cli.conftest import Remat

LLAMA = f"{ROOT / 'examples' / 'llama.py'}:factory"
SIZES = {
    "LAYERS": 3, "WIDTH": 64, "HEADS": 4, "KV_HEADS": 2, "HIDDEN": 128, "SEQ": 32, "VOCAB": 96,
}  # fmt: skip
ASKED = (
    "run", LLAMA, "--device", "rtx4090", "--optimizer", "adamw", "--microbatches", "2",
    "--host", "4MiB", "--budget", "2MiB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setenv(f"LLAMA_{name}", str(value))


def test_the_plan_stands_beside_named_systems(remat: Remat) -> None:
    done = remat(*ASKED, columns=120)
    assert done.exit_code == 0, done.output
    said = done.stdout
    assert "Llama, a step of 2 microbatches of 32 tokens, adamw" in said
    for title in ("this plan", "ZeRO-Offload", "L2L", "ZeRO-Infinity", "PatrickStar"):
        assert title in said
    for row in ("lower bound", "order", "saved", "state", "gradients", "copies", "costs"):
        assert f"\n{row} " in said
    assert "float32 state" in said
    assert "planned, not run" in said


def test_ranks_show_what_they_share(remat: Remat) -> None:
    done = remat(*ASKED, "--sharding", "kind=fsdp2,world=4", columns=400)
    assert done.exit_code == 0, done.output
    assert "host 1.00 MiB" in done.stdout  # of 4 MiB, which 4 ranks share
    assert "ranks" in done.stdout
    assert "4 of a machine share its host, its NVMe and 60 GB/s of its memory" in done.stdout


def test_json_has_plain_figures(remat: Remat) -> None:
    done = remat(*ASKED, "--json", "--nvme", "/mnt/nvme:1GiB", "--nvme-gb-s", "5")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["plan"]["device_peak_bytes"] <= found["budget_bytes"] == 2 << 20
    assert found["plan"]["host_peak_bytes"] <= 4 << 20
    assert found["bound"]["lower_bound_us"] <= found["plan"]["time_us"]
    assert found["links"]["read"]["bytes_per_us"] == 5000
    times = [one["time_us"] for one in found["systems"].values() if "time_us" in one]
    assert times
    assert found["plan"]["time_us"] <= min(times)
    assert "arxiv.org" in found["systems"]["l2l"]["source"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--microbatches", "0"), "give 1 or more microbatches: 0 leave"),
        (("--optimizer", "none"), "'none' has no update to plan"),
        (("--host", ""), "give --host 120GiB too"),
        (("--nvme-gb-s", "5"), "5 GB/s is the rate of NVMe"),
        (("--nvme", "/mnt/nvme:1GiB", "--host", ""), "host"),
        (
            ("--device", "cpu"),
            "and run on a CPU with remat.rematerialize(model, ..., microbatches=...)",
        ),
        (("--solver", "cut"), "leave out --solver, or --microbatches"),
        (("--time-limit", "5"), "leave out --time-limit, or --microbatches"),
        (("--keep", "blocks.*"), "leave out --keep, or --microbatches"),
        (("--compare",), "leave out --compare: a plan of --microbatches is not run"),
        (("--price-of-gib",), "leave out --price-of-gib: a plan"),
        (("-o", "plan.json"), "leave out plan.json: a plan"),
        (
            ("--sharding", "kind=ddp,world=2"),
            "choose the sharding fsdp2, or leave out --microbatches",
        ),
        (("--budget", "min"), "'min' only makes sense without microbatches"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    words: tuple[str, ...], says: str, remat: Remat
) -> None:
    done = remat(*ASKED, *words)
    assert done.exit_code == 2, done.output
    (line,) = [one for one in done.stderr.splitlines() if one.strip()]
    assert says in line


def test_a_rate_without_a_whole_step_is_refused(remat: Remat) -> None:
    done = remat("run", LLAMA, "--device", "rtx4090", "--nvme-gb-s", "5")
    assert done.exit_code == 2
    assert "give --microbatches too" in done.stderr


def test_a_tier_that_is_too_small_names_the_least(remat: Remat) -> None:
    done = remat(*ASKED, "--budget", "1MiB", "--host", "64KiB")
    assert done.exit_code == 3
    assert "give --host" in done.stderr
    found = json.loads(remat(*ASKED, "--budget", "1MiB", "--host", "64KiB", "--json").stdout)
    assert found["plan"] is None
    assert found["shortage"].endswith("no plan of this step fits 64.0 KiB on the host")
