"""The parts of a generation: options, prompt, sequence, the drafter's side, pipelining, clock."""
