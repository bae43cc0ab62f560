"""Trained heads: drafters that read the target's states, and models trained to draft in parallel.

`loading` has the entry point and the table of formats, `drafter` the head as a drafter, `session`
its side of a generation; most other modules are kinds of heads.
"""
