"""Token-level speculation without a model: proposals, token trees, random keys, draft sources.

Pure numpy. Shared by the orchestrator (merging, lengths), the drafters (proposing) and the
inference core (verifying).
"""
