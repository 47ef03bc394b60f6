"""What a cache of plans has at hand, and what it keeps on disk for later processes."""
