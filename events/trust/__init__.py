"""Who a process is, and what it may say: nkeys, certificates, TLS, NATS logins, signed memberships.

Use `keys`, `certificates`, `tls`, `logins` (permissions as data), `accounts` (what separates them on NATS), `signing`,
`membership_certificates`, `membership_digest`. The head's own renewal and node enrolment live in
`unicrond/service/trust`; peers' tokens in `agents/memory/peer_tokens.py`.
"""
