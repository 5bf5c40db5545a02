"""Questions that fold and decide both ask of a whole state: the survey, admission, requests, plan problems, deadlines.

`survey.Survey` is one look at a state; `invariants` must hold after every fold.
"""
