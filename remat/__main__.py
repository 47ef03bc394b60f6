"""The command line as `python -m remat`."""

from remat.cli.entry import command

command()
