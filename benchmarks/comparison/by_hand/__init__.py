"""What people write into a loop themselves: copies to the host, chunked losses, early updates.

Torch has more names for the first than ways that run here. `offload_wrapper` is `save_on_cpu`
around a module. `CheckpointPolicy.MUST_CPU_OFFLOAD` and `enable_activation_offloading` are read by
its compiler alone, which copies between a GPU and the host.
"""
