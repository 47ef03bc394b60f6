"""What forward does beside its result: each step does it too, or it is refused."""
