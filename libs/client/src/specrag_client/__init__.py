"""Python client and command line."""
