"""Training: heads and draft models for a target, from texts and from what it writes itself.

`run.train` is the way in, `command` its flags. `texts` and `continuations` make windows of tokens,
`features` keeps what a pass of the target over them shows, `fitting` minimises a loss of `losses`
over that, `measuring` says what would be accepted. What is trained is a `trainees.Trainee`:
`recursive` for heads that go on from their own states, `one_pass` for the others.
"""
