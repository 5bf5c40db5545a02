"""The HTTP API: state, events, requests; the page's answers, workers' output, node checks, metrics.

Use `api.Api`. Who may ask lives in `access`; what must not be shown in `redaction`.
"""
