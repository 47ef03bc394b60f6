"""What is proved: least times and least peaks of any schedule.

What each bound holds for:

- every op once: time of every schedule;
- `cut_program`, `lazy_cuts`: time in captured order, with any number of recomputations;
- `any_order_cut`: time, and least peak, in any order of first computations;
- `least_peak`: the floor is the least peak in captured order if no output of the step is computed
  twice; its bound holds in captured order for any number of recomputations.

A bound in captured order is left out where any order was asked for, even if it is higher.
`tests/solver/test_all_solvers.py` sets every solver's bound against every solver's schedule.
"""
