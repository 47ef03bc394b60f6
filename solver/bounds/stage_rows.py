"""Rows of memory inside a stage: what is live while an op runs again, right before a cut.

They close what cuts leave open where recomputing itself is what needs the memory. They hold in the
given order of first computations, for any number of recomputations.
"""

from __future__ import annotations

from remat.solver.bounds.cut_program import MOST_SIZE, ROW_SCALE, CutProgram


def add_stage_row(cuts: CutProgram, k: int, op: int) -> None:
    """Bound what is live while `op` runs again right before the op of cut k.

    through[v] >= carried in + live at t - made again - 1
    Σ size · through + (outputs and workspace of op) · again[op] <= room,
    where an input of op counts if it is through or if op runs, in a variable of this row:
    it may be gone when another op runs again.
    Does nothing where op cannot run again in that stage, or cut k - 1 is not its start.
    """
    if k == 0 or cuts.cuts[k - 1] + 1 != cuts.cuts[k] or op not in cuts.again[k - 1]:
        return
    problem = cuts.problem
    runs = cuts.again[k - 1][op]
    terms = {runs: problem.output_bytes[op] + problem.workspace_bytes[op]}
    outputs = set(problem.outputs[op])
    inputs = set(problem.inputs[op])
    for v in sorted({*cuts.carried[k - 1], *cuts.free_at(k - 1)}):
        size_bytes = problem.size_bytes[v]
        if v in outputs or not size_bytes:
            continue
        through = _through(cuts, k, v)
        if through is None and v in inputs:
            terms[runs] += size_bytes
        elif through is not None:
            counted = _either(cuts, through, runs) if v in inputs else through
            terms[counted] = size_bytes
    room = cuts.budget_bytes - problem.resident_bytes
    unit = max(room, 1) / ROW_SCALE
    row = [(x, min(size / unit, MOST_SIZE)) for x, size in terms.items() if size]
    cuts.program.row(row, upper=room / unit)


def _either(cuts: CutProgram, left: int, right: int) -> int:
    """A variable that is 1 where one of two is."""
    either = cuts.program.variable()
    for index in (left, right):
        cuts.program.row([(either, 1.0), (index, -1.0)], lower=0.0)
    return either


def _through(cuts: CutProgram, k: int, v: int) -> int | None:
    """A variable that is 1 where v is live through the stage; None where it cannot be said."""
    known = cuts.through.get((k, v))
    if known is not None:
        return known
    live_at = cuts.carried[k].get(v)
    if v not in cuts.problem.needs[cuts.cuts[k]] and live_at is None:
        return None
    carried = cuts.carried[k - 1].get(v)
    through = cuts.program.variable()
    row = [(through, 1.0)]
    missing = 1.0
    for bit in (carried, live_at):
        if bit is None:
            missing -= 1.0
        else:
            row.append((bit, -1.0))
    again = _made_again(cuts, k - 1, v)
    if again is not None:
        row.append((again, 1.0))
    cuts.program.row(row, lower=-missing)
    cuts.through[k, v] = through
    return through


def _made_again(cuts: CutProgram, k: int, v: int) -> int | None:
    """The bit that v is made again in interval k, None where it must not be."""
    problem = cuts.problem
    op = problem.producer[v]
    if problem.pinned[op]:
        return None
    if op not in cuts.again[k]:
        cost = problem.cost_us[op] / cuts.cost_unit_us
        cuts.again[k][op] = cuts.program.variable(cost, integer=True)
    return cuts.again[k][op]
