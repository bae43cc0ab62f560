"""Training of heads and draft models for a target, from texts and from the target's answers.

`run.train` is the way in, `command` its flags. `texts` makes windows of tokens, `features` keeps
what the target shows of them, `fitting` minimises one of the `losses` and measures what drafting
would keep. `trainees` and `recursive` make what is trained; `online` goes on while it is used.
"""
