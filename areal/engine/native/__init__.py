"""The embedded engine's step in C++: the source, how a library comes of it, and the kernel that calls it."""
