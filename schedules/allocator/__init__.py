"""What torch's CUDA caching allocator takes from a device, replayed without one."""
