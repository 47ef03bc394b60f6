"""The command line as `python -m remat`."""

from remat.cli.main import main

main()
