"""How many microbatches are in flight on a stage: their saved bytes are live at once.

Sources: PipeDream-Flush, called 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503), its
interleaved form with several chunks of the model a rank (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473), and that with gradients of weights apart, ZB1P (Qi et al. 2023,
https://arxiv.org/abs/2401.10241). `tests/schedules/pipeline` replays torch's own action lists and
finds the same counts.
"""

from __future__ import annotations

from typing import NamedTuple


class Flight(NamedTuple):
    """What is live at once, in microbatches of all of a rank's blocks.

    Attributes
    ----------
    saved : whose backward has not made the gradients of inputs. waiting : that wait for their
        gradients of weights.
    """

    saved: float
    waiting: float = 0.0


def chunks_in_flight(
    stage: int, stages: int, microbatches: int, chunks: int, *, is_split: bool = False
) -> int:
    """Forwards of a chunk that rank `stage` of `stages` has open at most.

    With one chunk a rank, a chunk is the whole stage.

    Parameters
    ----------
    is_split : whether gradients of weights are made apart.
    """
    behind = stages - 1 - stage
    if chunks == 1 and not is_split:
        return min(microbatches, behind + 1)
    warm = (1 if is_split else 2) * behind + (chunks - 1) * stages
    return min(microbatches * chunks, warm + 1)


def flights(
    stage: int, stages: int, microbatches: int, chunks: int, *, is_split: bool = False
) -> tuple[Flight, ...]:
    """Any of which may hold the most: while a forward runs, and after the next backward."""
    opened = chunks_in_flight(stage, stages, microbatches, chunks, is_split=is_split)
    if not is_split:
        return (Flight(opened / chunks),)
    waiting = min(stage, microbatches * chunks - opened)
    return (
        Flight(opened / chunks, waiting / chunks),
        Flight((opened - 1) / chunks, (waiting + 1) / chunks),
    )
