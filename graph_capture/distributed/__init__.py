"""One rank of many: collectives, DTensors, and the steps that FSDP and DDP make of a graph."""
