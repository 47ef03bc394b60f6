"""The tests on each release of torch that the package takes: `python -m tests.versions`."""
