"""The public cases that `specfsm` exists to refuse, one small scenario each, from its public names alone.

A scenario is a subclass of `tests.cases.case.Case`. The modules here hold one rule each; `test_cases.py` runs them
all, `docs/cases.md` and `docs/errors.md` are written from them.
"""
