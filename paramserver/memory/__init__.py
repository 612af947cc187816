"""The host's memory for snapshots: mappings, the pool, the store above it, and what outlives the process."""
