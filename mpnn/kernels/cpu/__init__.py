"""CPU kernels in C++, their loader, and the threads that run them."""
