"""The relay's process: start and shutdown, its gRPC service, what operators do to it, its metrics."""
