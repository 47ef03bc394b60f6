"""What plans reserve of a device, by allocator, and what overhead that costs."""
