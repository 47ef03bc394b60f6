"""Ways of training on ranks, each beside plain torch: what comes of it, and docs/distributed.md."""
