"""Files without names, which hold what leaves a device: they go with the process."""
