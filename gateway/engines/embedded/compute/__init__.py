"""The computation of the embedded engine: weights, the forward pass, attention over KV, sampling. Needs torch."""
