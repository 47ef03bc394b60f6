"""One arena a plan: each request of a step gets a planned place, or torch's allocator serves it."""
