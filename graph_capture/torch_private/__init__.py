"""The private parts of torch that remat stands on: no other file names one."""
