"""Online policies that evict when memory is full; their runs are the plan."""
