"""The wire protocols: pure translation between JSON and the engine's neutral types. No I/O."""
