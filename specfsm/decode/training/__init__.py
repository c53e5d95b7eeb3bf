"""Train the MTP draft head on the target's own answers: ``specfsm train-draft``.

No data set is needed. Prompts come from templates filled with words, and from the target itself, which is asked to
write the user's turn (`prompts`). The target answers them, mostly greedily (`sampler`). The head learns the target's
distributions over these answers (`objective`), unrolled: step k starts from the state that step k - 1 made, with the
keys that it left, just as the decode loop will run it (`unroll`, `fit`). Acceptance is counted on held-out prompts,
of other templates and other words (`evaluation`). `run` puts these together, `settings` is the command line.

With ``--steps`` the result is a function of the seed (on one device); ``--minutes`` bounds the run by the clock, and
then how far it gets depends on the machine.
"""
