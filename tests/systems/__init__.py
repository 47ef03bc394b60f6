"""Systems other than Linux, as far as one can be made to look like another."""
