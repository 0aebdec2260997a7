"""What spans processes and nodes: rank actors, the prefix store, telemetry totals, routing."""
