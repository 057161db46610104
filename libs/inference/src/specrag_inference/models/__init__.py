"""Model references, loading, conversion and fingerprints."""
