"""Trained heads: drafters that read the target's states, and models trained to draft in parallel.

`loading.load_head` is the way in, `formats` the table of what can be loaded. `drafter` is what it
returns, `session` what all heads do in a generation; `recurrent` drafts token by token from states
that it made (`eagle`, `mtp`), `dflash`, `medusa` and `pard` draft in one pass, `early_exit` is the
target itself, cut short.
"""
