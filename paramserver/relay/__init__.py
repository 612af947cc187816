"""One relay: its lease in the registry, its versions, fetches and watchers."""
