"""The host's memory for snapshots: mappings, the pool and its allocator, the store, and snapshots left as files."""
