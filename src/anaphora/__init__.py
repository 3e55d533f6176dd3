"""Anaphora: prompt caching for models you run yourself."""

__version__ = "0.1.0"
