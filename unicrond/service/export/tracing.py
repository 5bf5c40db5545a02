"""Spans (views/spans.py) to a collector of OpenTelemetry, by OTLP over HTTP. Needs the extra `otel`.

Rules
-----
* OpenTelemetry's own exporter and queue: a thread sends, in batches; a queue that is full loses what comes, and says
  so. Nothing waits for it.
* Headers, certificates, compression and timeouts are the exporter's own settings: OTEL_EXPORTER_OTLP_*. Attributes of
  this process are OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from unicrond import VERSION
from unicrond.views.spans import Span

#: How long the last spans may take to be sent, at the end.
_CLOSE_MS = 2000


class Tracing:
    """Sends spans to a collector. `url`: where to post, /v1/traces of a collector."""

    def __init__(self, url: str) -> None:
        self._resource = Resource.create({"service.name": "unicrond", "service.version": VERSION})
        self._scope = InstrumentationScope("unicrond", VERSION)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))

    def ended(self, spans: Sequence[Span], hide: Callable[[str], str] = str) -> None:
        """Send spans that have ended. Never waits. `hide`: maps a text to its form without secrets."""
        for span in spans:
            self._processor.on_end(self._readable(span, hide))

    async def run(self) -> None:
        """Wait until cancelled; then send what is left, for a short time."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._processor.force_flush(_CLOSE_MS)
        self._processor.shutdown()

    def _readable(self, span: Span, hide: Callable[[str], str]) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace, span.span),
            parent=_context(span.trace, span.parent) if span.parent else None,
            resource=self._resource,
            attributes={
                name: hide(attribute) if isinstance(attribute, str) else attribute
                for name, attribute in span.about.items()
            },
            status=Status(StatusCode.ERROR, hide(span.error)) if span.error else Status(),
            start_time=span.start_us * 1000,
            end_time=span.end_us * 1000,
            instrumentation_scope=self._scope,
        )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
