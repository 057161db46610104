"""Contracts' runtime, sessions and speculation shared by every service."""
