"""The torch core: models, block cache, tree attention, scheduling and lossless verification."""
