"""Both ends of the hand-over as state machines: events and the time go in, things to do come out.

Nothing in this package touches a socket, a tensor or a clock, so that tests and the planner drive the very objects
that the workers run. `sender` is the end that computed the KV, `receiver` the end that will generate from it.
"""
