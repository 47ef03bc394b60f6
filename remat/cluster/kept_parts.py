"""Parts of a job, captured and solved when first asked for, and kept on disk for the next plan.

A file is named by all that its part depends on: the ops of one forward with their shapes and
numbers, the split, the device, the links, and the versions of torch and remat.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
import torch

from remat import __version__
from remat.cluster.capture.chain_shape import ChainPosition
from remat.cluster.capture.rank_graph import behind_graph_on_rank, block_graph_on_rank
from remat.cluster.mesh import Cluster, Job
from remat.cluster.opened_chain import Chains
from remat.cluster.parts import Part, PartOption, PartWork, part_of, part_work
from remat.graph_capture.cache_files import CacheFiles
from remat.graph_capture.distributed.fake_group import FakeGroups
from remat.graph_capture.files import decode_json
from remat.graph_capture.graph import TrainingGraph

_SCHEMA = 5
"""Of the files; those of another one are not read."""
_FILES = CacheFiles("parts of clusters", "each plan captures them anew", "cluster", most_files=4096)


class _KeptPart(msgspec.Struct, frozen=True):
    """A graph, None for what is not captured, and its part, None while no options were asked for.

    `border_gradient` : of a block, the value that is the gradient of what it reads.
    """

    graph: TrainingGraph | None
    part: Part | None = None
    border_gradient: str = ""


@dataclass
class KeptParts:
    """The parts of one job on one cluster; some are `captured` now, and others `read` from disk."""

    chains: Chains
    job: Job
    cluster: Cluster
    groups: FakeGroups
    captured: int = 0
    read: int = 0
    known: dict[tuple[ChainPosition, int, int, int], _KeptPart] = field(
        default_factory=dict[tuple[ChainPosition, int, int, int], _KeptPart]
    )

    def work(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> PartWork:
        found = self._begun(place, tp, cp, microbatch)
        if found.part is not None:
            return found.part.work
        assert found.graph is not None
        # A mesh that its work alone rules out needs no options.
        return part_work(found.graph, found.border_gradient)

    def part(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> Part:
        key = place, tp, cp, microbatch
        found = self._begun(*key)
        if found.part is not None:
            return found.part
        assert found.graph is not None
        part = part_of(found.graph, found.border_gradient)
        self.known[key] = msgspec.structs.replace(found, part=part)
        # Written once more, now with its options.
        self._keep(key)
        return part

    def graph(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> TrainingGraph:
        found = self._begun(place, tp, cp, microbatch).graph
        assert found is not None
        return found

    def _begun(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> _KeptPart:
        key = place, tp, cp, microbatch
        if key not in self.known:
            self.known[key] = (
                self._embedding(tp, cp, microbatch) if place == "first" else self._of_disk(*key)
            )
        return self.known[key]

    def _embedding(self, tp: int, cp: int, microbatch: int) -> _KeptPart:
        """Costed by its bytes: rows read and written, a gradient filled and added."""
        rows = microbatch * self.job.border_bytes / (tp * cp)
        table_bytes = 2 * self.job.weights["first"].on_rank(tp)
        rate = self.cluster.bytes_per_us
        forward_us, backward_us = 2 * rows / rate, (table_bytes + 2 * rows) / rate
        need = int(rows) + table_bytes
        return _KeptPart(None, Part(forward_us, backward_us, (PartOption(0, need, 0.0),)))

    def _of_disk(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> _KeptPart:
        key = place, tp, cp, microbatch
        found = _FILES.read(self._name(*key), lambda data: decode_json(data, _KeptPart))
        if found is not None:
            self.read += 1
            return found
        self.captured += 1
        self.known[key] = self._captured(*key)
        self._keep(key)
        return self.known[key]

    def _keep(self, key: tuple[ChainPosition, int, int, int]) -> None:
        _FILES.write(self._name(*key), msgspec.json.encode(self.known[key]))

    def _captured(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> _KeptPart:
        chain, shape = self.chains.at(microbatch, self.job.seq // cp)
        device, links = self.cluster.device, self.cluster.links
        if place == "block":
            graph, gradient = block_graph_on_rank(chain, shape, tp, cp, self.groups, device, links)
            return _KeptPart(graph, border_gradient=gradient)
        return _KeptPart(behind_graph_on_rank(chain, shape, tp, self.groups, device, links))

    def _name(self, place: ChainPosition, tp: int, cp: int, microbatch: int) -> str:
        # The ops at microbatch 1 stand for all; the microbatch is named beside them.
        _, shape = self.chains.at(1, self.job.seq)
        said = (
            _SCHEMA, shape.digest, place, tp, cp, microbatch, self.job.seq, self.cluster.device,
            self.cluster.links, str(torch.__version__), __version__,
        )  # fmt: skip
        return f"{hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:24]}.json"
