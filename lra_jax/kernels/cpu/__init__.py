"""Kernels for CPUs, in C++, compiled on the machine when they are first needed."""
