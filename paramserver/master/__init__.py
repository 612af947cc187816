"""The master's part: runs' claims, publications, drafts, the rendezvous of ranks, sealing, and its standing duties."""
