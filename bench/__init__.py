"""Measurements: each prints a table and exits non-zero when a stated bound is missed."""
