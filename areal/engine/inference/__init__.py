"""Generate tokens: the engine, its scheduler, sampler and caches, and its use from other processes."""
