"""Orchestrator service: drives an answer from question to committed text."""
