"""Online policies that evict when memory is full, and fixed rules; their runs are the plan."""
