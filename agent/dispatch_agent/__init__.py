"""Execution identity and stale-proof checkpoint publication, inside a training job's containers."""

__version__ = "0.1.0"
