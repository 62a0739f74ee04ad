"""Train one model on several ranks: transformers' modules sharded by FSDP2 and tensor parallelism."""
