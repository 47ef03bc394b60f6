"""The solver `cut`: a bound by relaxed cuts, and the schedules that it starts from."""
