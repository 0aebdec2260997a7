"""Peers, each a script of its own: reads a job as JSON on stdin, prints one JSON line of runs.

None imports Flare, so each can run under the interpreter of its own environment.
"""
