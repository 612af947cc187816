"""What runs inside inference engines to load from a snapshot. Nothing else of ours imports this package."""
