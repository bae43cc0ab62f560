"""Training of heads and draft models for a target, from texts and from the target's answers.

`run.train` is the way in; `texts` makes windows, `features` keeps what the target shows of them,
`trainees` makes what is trained, `fitting` minimises a loss, and `online` goes on in use.
"""
