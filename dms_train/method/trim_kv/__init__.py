"""Token retention: gates that predict how long each token is worth keeping."""
