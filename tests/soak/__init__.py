"""`make soak`: the whole system under load and seeded chaos, judged by clients that know the right answers.

`python -m tests.soak` is the one way in. `work` says what is asked and what is right, `runner` and `trainer` are the
programs that ask, `judge` compares their journals, `chaos` draws faults, `faults` carries them out on the `fleet`.
"""
