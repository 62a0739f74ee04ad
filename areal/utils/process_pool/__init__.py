"""Run functions in worker processes that can be killed: begin with `pool`. Importing this package loads nothing."""
