"""Many values in one open file: their ranges never overlap, are used again, and end with it."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.spill_files import BLOCK_BYTES, File, Folder, host_folder
from tests.rewriter.tiers.plans import is_clean

MANY = 3000
BLOCKS = st.integers(0, 3 * BLOCK_BYTES)
DONE = st.lists(st.one_of(BLOCKS, st.integers(-9, -1)), max_size=60)
"""A size is taken; of what is held, the one of a negative number ends."""


@settings(max_examples=100)
@given(done=DONE)
def test_ranges_hold_their_own_bytes_and_are_used_again(done: list[int]) -> None:
    folder = Folder(host_folder(), "host")
    held: list[tuple[File, torch.Tensor]] = []
    most = now = 0
    for i, one in enumerate(done):
        if one >= 0:
            x = torch.full((one,), i % 251, dtype=torch.uint8)
            file = File(folder, one)
            file.write_from(x.data_ptr())
            held.append((file, x))
            del file
        elif held:
            del held[one % len(held)]
        for file, x in held:
            found = torch.zeros_like(x)
            file.read_to(found.data_ptr())
            assert torch.equal(found, x)
        now = sum(-(-x.numel() // BLOCK_BYTES) for _, x in held)
        most = max(most, now)
    assert len({file.descriptor for file, _ in held}) <= 1
    if not any(one < 0 for one in done) and held:
        assert held[0][0].shared.size_bytes == most * BLOCK_BYTES


def test_equal_values_that_come_and_go_take_no_more_of_the_file(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), "host")
    held = [File(folder, 5000) for _ in range(4)]
    for _ in range(50):
        held.pop(0)
        held.append(File(folder, 5000))
    assert held[0].shared.size_bytes == 4 * 2 * BLOCK_BYTES
    assert len({file.descriptor for file in held}) == 1
    del held
    assert is_clean(tmp_path)


def test_more_values_than_a_process_may_have_files(tmp_path: Path) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MANY // 2, most))
    try:
        folder = Folder(str(tmp_path), "host")
        held = [File(folder, 10) for _ in range(MANY)]
        assert len({file.start for file in held}) == MANY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
