"""The same prompts by this engine and by others; each peer runs in a process of its own."""
