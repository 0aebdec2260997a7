"""The shared vocabulary. Imports nothing else of Flare."""
