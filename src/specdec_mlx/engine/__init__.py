"""The parts of a round: the sequence, the drafter's side, pipelining, the clock, the end."""
