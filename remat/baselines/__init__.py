"""Published algorithms that `auto` never asks: chains, rules, evictions, offload policies."""
