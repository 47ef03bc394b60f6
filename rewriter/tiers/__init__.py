"""Memory below the device: values are copied there and back while a step runs."""
