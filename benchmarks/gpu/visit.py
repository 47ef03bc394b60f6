"""What a visit measures, in order, with the seconds that each row is thought to hold the GPU."""

from __future__ import annotations

import tarfile
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.gpu.ceilings import CEILINGS, PROFILED, begin_ceilings, begin_profiles
from benchmarks.gpu.compiled import COMPILED_VARIANTS, begin_compiled
from benchmarks.gpu.levers import LEVERS_BY_NAME, begin_levers
from benchmarks.gpu.models import COMPILED, REHEARSED, REHEARSED_COMPILED
from benchmarks.gpu.rows import RowFile
from benchmarks.gpu.scheduler import Group, Settings, Unit, run
from benchmarks.gpu.table import (
    DEMO_VARIANTS,
    EXPANDABLE,
    ON_CPU,
    VARIANTS,
    begin_demo,
    begin_table,
)

LEVER_S, LARGE_LEVER_S = 6.0, 12.0
LARGE_LEVERS = ("compile=True", 'backend="remat"')
TABLE_S = {
    "gpt2-small": 3.0, "llama-1b": 7.0, "resnet-50": 4.0, "vit-l": 4.0, "unet": 4.0,
    "gpt2-medium": 5.0, "resnet-152": 4.0,
}  # fmt: skip
COPIED = 2.0
"""`save_on_cpu` takes so many times as long as other rows."""
SETUP_S, COMPILED_S, DEMO_S, PROFILE_S, CEILING_S = 15.0, 10.0, 15.0, 10.0, 3.0
REHEARSED_S = 0.5
REHEARSED_EXAMPLES = {
    "GPT_LAYERS": "1", "GPT_WIDTH": "32", "GPT_HEADS": "2", "GPT_SEQ": "32", "GPT_VOCAB": "64",
    "RESNET_WIDTH": "8", "RESNET_BATCH": "2",
}  # fmt: skip
"""Sizes of those that are profiled."""
CONF = "PYTORCH_CUDA_ALLOC_CONF"
PACKED = "profiles_and_costs.tar.gz"


def groups_of(visit: int, *, rehearse: bool) -> list[Group]:
    """All processes of a visit, which is the n-th that adds to its rows."""
    ceilings = [f"visit/{visit}", *(f"ceilings/{name}" for name in CEILINGS)]
    levers = {f"levers/{name}": _lever_s(name) for name in LEVERS_BY_NAME}
    found = [
        Group("ceilings", _units(dict.fromkeys(ceilings, CEILING_S)), begin_ceilings),
        Group("levers", _units(levers), begin_levers),
    ]
    for name in REHEARSED:
        rows = {f"table/{name}/{variant}": _table_s(name, variant) for variant in VARIANTS}
        found.append(Group(f"table of {name}", _units(rows), partial(begin_table, name), SETUP_S))
    for name in REHEARSED_COMPILED if rehearse else COMPILED:
        rows = {f"compiled/{name}/{variant}": COMPILED_S for variant in COMPILED_VARIANTS}
        begin = partial(begin_compiled, name)
        found.append(Group(f"{name} compiled", _units(rows), begin, SETUP_S))
    profiles = {f"profiles/{name}": PROFILE_S for name in PROFILED}
    found.append(Group("profiles", _units(profiles), begin_profiles))
    rows = {f"demo/{variant}": DEMO_S for variant in DEMO_VARIANTS}
    found.append(Group("too large a model", _units(rows), begin_demo, SETUP_S))
    env = {CONF: "expandable_segments:True"}
    last = _units({f"demo/{EXPANDABLE}": DEMO_S})
    found.append(Group("the same, expandable", last, begin_demo, SETUP_S, env))
    return [_rehearsed(one) for one in found] if rehearse else found


def _units(seconds: dict[str, float]) -> tuple[Unit, ...]:
    return tuple(Unit(key, estimate_s) for key, estimate_s in seconds.items())


def _lever_s(name: str) -> float:
    return LARGE_LEVER_S if name in LARGE_LEVERS else LEVER_S


def _table_s(name: str, variant: str) -> float:
    return TABLE_S[name] * (COPIED if variant == ON_CPU else 1.0)


def _rehearsed(group: Group) -> Group:
    """In the same order, of models that take no time."""
    units = tuple(Unit(one.key, REHEARSED_S) for one in group.units)
    return Group(group.name, units, group.begin, REHEARSED_S, group.env)


def begin_visit(
    rows: Path, deadline_s: float, out: Path | None, carried: Path | None, *, rehearse: bool,
    workers: int,
) -> list[str]:  # fmt: skip
    """Measure what has no row yet, until then; keys of what is left."""
    file, device = RowFile(rows), "cpu" if rehearse else "cuda:0"
    visit = 1 + sum(key.startswith("visit/") for key in file.read())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        env = {"REMAT_CACHE": str(folder / "costs"), **(REHEARSED_EXAMPLES if rehearse else {})}
        settings = Settings(file, deadline_s, folder, device, rehearse, carried, env)
        try:
            return run(groups_of(visit, rehearse=rehearse), settings, workers)
        finally:
            if out:
                _pack(out, folder)


def _pack(out: Path, folder: Path) -> None:
    """One file of many, as few files come back from a machine that is lent."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / PACKED, "w:gz") as packed:
        for path in [*folder.glob("profile_*.json"), folder / "costs"]:
            if path.exists():
                packed.add(path, path.name)
