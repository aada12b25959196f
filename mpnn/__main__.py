"""`python -m mpnn`: the command line, also where its entry point is not on the path."""

from mpnn.cli import main

main()
