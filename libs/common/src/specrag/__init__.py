"""Generated from protos/: edit there, then run `make protos`."""
