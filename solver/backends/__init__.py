"""Runs programs: integer programs with HiGHS, SCIP or CBC, and processes that can be killed."""
