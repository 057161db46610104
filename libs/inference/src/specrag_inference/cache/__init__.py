"""The block-paged cache of keys and values: storage, block pool, block tables."""
