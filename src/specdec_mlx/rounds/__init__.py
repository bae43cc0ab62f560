"""What a round is made of: the sequence, the drafter's side, pipelining, the clock, the end."""
