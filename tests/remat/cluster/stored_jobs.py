"""Captured jobs kept as small files, so that the planner is tested on them without a capture.

``python -m tests.remat.cluster.stored_jobs [NAME ...]`` writes them anew. A file has the job, the
cluster, and of each part that a search asks for its times and options, without their schedules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from remat.cluster.mesh import (
    Cluster,
    ClusterRequest,
    Job,
    MeshSpec,
    Parts,
    all_degrees,
    all_states,
)
from remat.cluster.opened_chain import Chains, KeptParts, job_of
from remat.cluster.parts import ChainPosition, Part, PartWork
from remat.cluster.planner import ClusterPlan, ClusterSearch
from remat.graph_capture.distributed.collectives import fake_ranks

FOLDER = Path(__file__).with_name("stored")
MODELS = "benchmarks.cluster_models"
Key = tuple[ChainPosition, int, int, int]


class Wanted(NamedTuple):
    """What is stored: of a search that prunes, or of all meshes."""

    model: str
    request: ClusterRequest
    is_full: bool


WANTED = {
    "gpt_22b-16": Wanted(
        "gpt_22b",
        ClusterRequest(16, 32, 2048, "a100", 8, "72GiB", asked=MeshSpec(microbatch=1)), True
    ),
    "gpt_175b-64": Wanted(
        "gpt_175b",
        ClusterRequest(64, 64, 2048, "a100", 8, "72GiB", asked=MeshSpec(8, 1, 8, 1, 1)),
        True,
    ),
    "llama3_8b-64": Wanted(
        "llama3_8b",
        ClusterRequest(64, 512, 8192, "h100", 8, "72GiB", asked=MeshSpec(microbatch=1)),
        True,
    ),
    "llama3_70b-1024": Wanted(
        "llama3_70b", ClusterRequest(1024, 1024, 8192, "h100", 8, "72GiB"), False
    ),
}  # fmt: skip
BLOCK_128K = "llama3_70b_block_128k"
"""The graph of a block on one of 2 tensor and 8 context parallel ranks, at 131,072 tokens."""


class StoredPart(msgspec.Struct, frozen=True):
    """A part by its key; None where only its work was asked for."""

    place: ChainPosition
    degrees: tuple[int, int, int]
    work: PartWork
    part: Part | None = None


class StoredJob(msgspec.Struct, frozen=True):
    """A file."""

    job: Job
    cluster: Cluster
    asked: MeshSpec
    parts: tuple[StoredPart, ...]

    def search(self) -> ClusterSearch:
        """A new search, whose parts come from the file alone."""
        return ClusterSearch(self.job, self.cluster, FromFile(self.parts), self.asked)


@dataclass
class FromFile:
    """As of `Parts`; one that is not stored is a `KeyError`.

    Attributes
    ----------
    asked : whose options were asked for.
    """

    parts: tuple[StoredPart, ...]
    asked: set[Key] = field(default_factory=set[Key])

    def __post_init__(self) -> None:
        self.by_key = {(one.place, *one.degrees): one for one in self.parts}

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        """As of `Parts`."""
        return self.by_key[place, tp, cp, microbatch].work

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        """As of `Parts`."""
        key: Key = (place, tp, cp, microbatch)
        self.asked.add(key)
        found = self.by_key[key].part
        if found is None:
            raise KeyError(key)
        return found


@dataclass
class Recorder:
    """Parts that come from elsewhere, and what was asked of them."""

    source: Parts
    works: dict[Key, PartWork] = field(default_factory=dict[Key, PartWork])
    parts: dict[Key, Part] = field(default_factory=dict[Key, Part])

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        """As of `Parts`."""
        found = self.source.work(place, tp, cp, microbatch)
        return self.works.setdefault((place, tp, cp, microbatch), found)

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        """As of `Parts`."""
        self.work(place, tp, cp, microbatch)
        found = self.source.part(place, tp, cp, microbatch)
        return self.parts.setdefault((place, tp, cp, microbatch), found)


def stored_job(name: str) -> StoredJob:
    """The file of that name."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=StoredJob)


def all_plans(search: ClusterSearch) -> list[ClusterPlan]:
    """Every mesh evaluated, none pruned."""
    found = [
        search.evaluate(mesh)
        for degrees in all_degrees(search.job, search.cluster, search.asked)
        for mesh in all_states(degrees, search.cluster, search.asked)
    ]
    return [plan for plan in found if plan is not None]


def _captured(wanted: Wanted) -> StoredJob:
    request, cluster = wanted.request, wanted.request.cluster()
    with fake_ranks() as groups:
        chains = Chains(f"{MODELS}:{wanted.model}", "")
        job = job_of(chains, request, groups)
        recorder = Recorder(KeptParts(chains, job, cluster, groups))
        search = ClusterSearch(job, cluster, recorder, request.asked)
        run: Callable[[ClusterSearch], object] = all_plans if wanted.is_full else _pruned
        run(search)
    parts = tuple(
        StoredPart(key[0], key[1:], work, _figures(recorder.parts.get(key)))
        for key, work in sorted(recorder.works.items())
    )
    return StoredJob(job, cluster, request.asked, parts)


def _pruned(search: ClusterSearch) -> object:
    return search.run()


def _figures(part: Part | None) -> Part | None:
    """Without the ops that its options compute again."""
    if part is None:
        return None
    options = tuple(msgspec.structs.replace(one, recomputed=()) for one in part.options)
    return msgspec.structs.replace(part, options=options)


def _block_128k() -> bytes:
    request = ClusterRequest(128, 128, 131072, "h100", 8, "72GiB", asked=MeshSpec(2, 8))
    cluster = request.cluster()
    with fake_ranks() as groups:
        chains = Chains(f"{MODELS}:llama3_70b", "")
        job = job_of(chains, request, groups)
        return KeptParts(chains, job, cluster, groups).graph("block", 2, 8, 1).to_json()


def main(names: list[str]) -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, wanted in WANTED.items():
        if not names or name in names:
            (FOLDER / f"{name}.json").write_bytes(msgspec.json.encode(_captured(wanted)))
            print(name, flush=True)
    if not names or BLOCK_128K in names:
        (FOLDER / f"{BLOCK_128K}.json").write_bytes(_block_128k())
        print(BLOCK_128K)


if __name__ == "__main__":
    main(sys.argv[1:])
