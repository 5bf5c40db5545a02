"""An event's bytes: envelope, codec, schemas, and what becomes of fields that this version does not know.

Use `envelope.Envelope`, `codec.encode` and `codec.decode`; `schemas` says what a reader of an older schema is given,
`upcast` raises older messages, `tolerance` drops unknown fields of observations, `selection` filters entries. The
events themselves live in `vocabulary`; subjects and headers live in `log/subjects.py`.
"""
