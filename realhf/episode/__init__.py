"""One episode of an older agent, as a RolloutWorkflow of `areal`.

Serves its queues from the engine, remembers every token that was sampled, and trains on nothing else.
"""
