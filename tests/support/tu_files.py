"""A small file in the format of the TU collections."""

TWO_GRAPHS = "2\n3 1\n5 2 1 2\n7 1 0\n5 1 0\n2 -1\n7 0\n7 0\n"
