"""Generate tokens: the engine, its scheduler, sampler and caches, and how other processes reach it."""
