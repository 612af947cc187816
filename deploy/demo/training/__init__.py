"""The demo's trainer: GRPO over families of models, and how many steps fit into its time."""
