"""Published cluster jobs beside the planner: on their own mesh, and on the one that it chooses."""
