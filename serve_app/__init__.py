"""The Ray Serve graph: HTTP in, HTTP out."""
