"""One solve of the solver benchmark, and what it is compared with."""
