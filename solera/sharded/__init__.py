"""A learner over several processes. Each holds a part of every weight (FSDP2)."""
