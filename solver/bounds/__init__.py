"""What is proved: least times and least peaks of any schedule.

Every op once bounds the time of all. `cut_program` and `lazy_cuts` hold in captured order for any
number of recomputations, `any_order_cut` in any order. The floor of `least_peak` is the least peak
in captured order if no output is computed twice; its bound holds for any number. A bound in
captured order is left out where any order was asked for. `tests/solver/test_all_solvers.py` sets
every solver's bound against every solver's schedule.
"""
