"""What each op takes: measured, kept on disk, modelled or from a profile."""
