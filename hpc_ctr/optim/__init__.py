"""Dense optimizers and the k-step merge."""
