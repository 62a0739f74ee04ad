"""Run episodes, one file per way: an agent in this process or one of its own, an agent outside, a workflow in tokens."""
