"""The allocator in C++: no plan, however wrong, gives a range twice; and how it is built."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remat.graph_capture.errors import ArenaError
from remat.rewriter.arena import library as arena_code
from remat.rewriter.arena.arena import requests_of
from remat.rewriter.arena.library import ArenaLibrary, Counts, arena_library
from tests.rewriter.arena.steps_in_arena import needs_compiler

UNIT = 64


def opened(library: ArenaLibrary, sizes: list[int], offsets: list[int], bytes_: int) -> int:
    lasting = np.zeros(len(sizes), np.int64)
    return library.open(np.array(sizes), np.array(offsets), lasting, bytes_)


@needs_compiler
@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_plan_never_gives_a_range_twice(seed: int) -> None:
    source = np.random.default_rng(seed)
    n, arena_bytes = 200, 40 * UNIT
    sizes = (UNIT * source.integers(1, 5, n)).tolist()
    offsets = (UNIT * source.integers(-1, 36, n)).clip(-1).tolist()
    library = arena_library()
    number = opened(library, sizes, offsets, arena_bytes)
    live: list[tuple[int, Tensor]] = []
    for i, size in enumerate(sizes):
        wanted = size if source.random() < 0.9 else size + 8
        library.begin(number, i, n)
        block = torch.empty(wanted // 8, dtype=torch.int64)
        library.end()
        live.append((i, block.fill_(i)))
        if source.random() < 0.7:
            del live[source.integers(len(live))]
        assert all((tensor == j).all() for j, tensor in live)
    counts = library.counts(number)
    library.close(number)
    assert all((tensor == j).all() for j, tensor in live)
    assert counts.hits > 20
    assert counts.occupied > 20
    assert counts.unplanned > 5


@needs_compiler
def test_calls_that_are_left_out_or_put_in_do_not_move_the_others() -> None:
    library = arena_library()
    sizes = [UNIT * (1 + i) for i in range(8)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    number = opened(library, sizes, offsets, sum(sizes))
    library.begin(number, 0, 8)
    kept = [torch.empty(size // 4) for size in (*sizes[:2], 8, *sizes[2:4], *sizes[5:])]
    assert library.end() == Counts(hits=7, unplanned=1, missed_bytes=8)
    library.close(number)
    del kept


@needs_compiler
def test_what_is_counted() -> None:
    library = arena_library()
    number = opened(library, [64, 64, 64], [0, 0, -1], 64)
    library.begin(number, 0, 3)
    first, again = torch.empty(16), torch.empty(16)
    left = torch.empty(16)
    beyond, nothing = torch.empty(16), torch.empty(0)
    expected = Counts(hits=1, unplanned=1, occupied=1, missed_bytes=2 * 64)
    assert library.end() == expected
    assert library.end() == Counts()
    assert library.counts(number) == expected
    assert expected.misses == 2
    library.close(number)
    assert library.counts(number) == Counts()
    library.begin(number, 0, 3)
    assert not library.is_armed()
    del first, again, left, beyond, nothing


@needs_compiler
def test_what_was_kept_into_the_next_step_moves_out() -> None:
    library = arena_library()
    number = library.open(np.array([64, 64]), np.array([0, 0]), np.array([0, 1]), 64)

    def step() -> tuple[Tensor, Counts]:
        library.begin(number, 0, 2)
        gone = torch.empty(16)
        del gone
        return torch.empty(16), library.end()

    first, counts = step()
    assert counts == Counts(hits=2)
    _, counts = step()
    assert counts == Counts(kept=1, missed_bytes=64, moved_out=1)
    _, counts = step()
    assert counts == Counts(kept=1, missed_bytes=64)
    del first
    second, counts = step()
    assert counts == Counts(hits=1)
    _, counts = step()
    assert counts == Counts(hits=1)
    library.close(number)
    del second


@needs_compiler
def test_a_child_process_gives_blocks_back() -> None:
    library = arena_library()
    number = opened(library, [64], [0], 64)
    library.begin(number, 0, 1)
    block = torch.ones(16)
    assert library.end().hits == 1
    child = os.fork()
    if child == 0:
        del block
        library.close(number)
        os._exit(0 if torch.ones(16).sum() == 16 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert block.sum() == 16
    library.close(number)


@pytest.mark.slow
@needs_compiler
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = arena_code.built_library()
    assert path.parent == Path(os.environ["REMAT_CACHE"])
    assert torch.__version__.split("+")[0] in path.name
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert arena_code.built_library() == path
    monkeypatch.setenv("CXX", "env g++")
    monkeypatch.setenv("REMAT_CACHE", str(path.parent / "other"))
    assert arena_code.built_library().name == path.name
    assert list(path.parent.glob(f"{arena_code.BUILD}*")) == []


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ("no-such-compiler", r"needs a C\+\+ compiler"),
        ("false", "cannot compile the arena's library: it ended with status 1"),
        ("sh -c 'kill -9 $$'", "cannot compile the arena's library: it ended with status -9"),
    ],
)
def test_without_a_compiler_that_works(
    compiler: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ArenaError, match=f"train without an arena.*{told}"):
        arena_code.built_library()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_has_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    old, of_others = (tmp_path / f"{arena_code.BUILD}{name}" for name in ("old", "new"))
    for folder in (old, of_others):
        folder.mkdir()
        (folder / "half.so").write_bytes(b"half")
    long_ago_s = time.time() - arena_code.STALE_S - 1
    os.utime(old, (long_ago_s, long_ago_s))
    with pytest.raises(ArenaError):
        arena_code.built_library()
    assert list(tmp_path.iterdir()) == [of_others]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ArenaError, match="set REMAT_CACHE"):
        arena_code.built_library()


def test_a_library_that_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"nothing")
    with pytest.raises(ArenaError, match=f"remove {path}"):
        ArenaLibrary(path)


def test_requests_of_a_record() -> None:
    """Forward keeps calls 0 and 1, of which backward reads the second; it leaves call 3."""
    events = np.array([[8, 0], [16, 1], [24, 2], [-1, 2], [32, 3], [-1, 1]])
    found = requests_of(events, 4, 3)
    assert found.size_bytes.tolist() == [8, 16, 24, 32]
    assert found.start.tolist() == [0, 1, 2, 4]
    assert found.end.tolist() == [6, 5, 3, 6]
    assert found.outlives.tolist() == [True, False, False, True]
    assert found.is_placed.tolist() == [False, True, True, True]
    assert found.buffers.load_bytes == 16 + 32
    assert requests_of(events, 4, 3, (2,)).is_placed.tolist() == [False, True, False, True]
