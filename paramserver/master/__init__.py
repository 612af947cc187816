"""The master's part: publications, drafts, ranks, sealing, and its standing duties."""
