"""The reference engine: a plain transformer in NumPy behind the engine protocol."""
