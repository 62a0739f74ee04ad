"""Run functions in worker processes that can be killed: `pool` is where to begin. Importing the package loads nothing."""
