"""The relay's process: `parts` puts a relay together; start and shutdown, gRPC service, status, metrics, operations."""
