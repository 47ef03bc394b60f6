"""How many microbatches are in flight on a stage: their saved bytes are live at once.

Sources: PipeDream-Flush, called 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503), and
its interleaved form with several chunks of the model a rank (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473). `tests/schedules/pipeline` replays torch's own action lists and
finds the same counts.
"""

from __future__ import annotations


def chunks_in_flight(stage: int, stages: int, microbatches: int, chunks: int) -> int:
    """Forwards of a chunk that rank `stage` of `stages` has open at most.

    With one chunk a rank, a chunk is the whole stage.
    """
    if chunks == 1:
        return min(microbatches, stages - stage)
    warm = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return min(microbatches * chunks, warm + 1)


def in_flight(stage: int, stages: int, microbatches: int, chunks: int) -> float:
    """Microbatches of all of a rank's blocks whose saved bytes are live at once."""
    return chunks_in_flight(stage, stages, microbatches, chunks) / chunks
