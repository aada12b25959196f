"""Models of other libraries, run as message passing."""
