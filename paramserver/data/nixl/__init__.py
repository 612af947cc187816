"""Chunks over NIXL: in processes of its own, since a fault of the library must not end the relay."""
