"""Verifier service: the target model."""
