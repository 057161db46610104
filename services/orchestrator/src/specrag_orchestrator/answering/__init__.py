"""One answer's life: from the question to its last event."""
