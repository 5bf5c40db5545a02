"""Deliberate bugs: does the fuzzer notice them? `make mutants` prints the table.

Use `mutation` (what a mutant is), `head_mutants`, `node_mutants`, `table`.
"""
