"""Session memory: the turn log and the lease that orders its writers."""
