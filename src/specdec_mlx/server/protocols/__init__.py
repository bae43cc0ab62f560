"""The protocols: a body in, one internal request; events in, a reply or a stream."""
