"""What a plan relies on, looked at before each step."""
