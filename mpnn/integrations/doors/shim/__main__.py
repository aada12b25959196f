"""`python -m mpnn.shim NAME[,NAME...] script.py`."""

import sys

from mpnn.integrations.shim import main

main(sys.argv[1:])
