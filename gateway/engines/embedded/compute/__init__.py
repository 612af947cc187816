"""What the embedded engine computes: weights, the forward pass, attention over KV, sampling. Needs torch."""
