"""An incident as a trace: from the log alone, whole, and by OpenTelemetry's own exporter to a real receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from aiohttp import web

from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.stories import random_life, trained
from unicrond.agents.fork_server.worker_process import resource_attributes
from unicrond.agents.protocol.messages import Launch
from unicrond.core.replayer import LogStep, steps
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.intake.config import Config, ConfigError, check
from unicrond.views.spans import DECISION, DETECTION, FIRST_STEP, REGROUPING, Span, Spans
from unicrond.views.view import feed_all


def spans_of(log: Iterable[Entry]) -> list[Span]:
    ended: list[Span] = []
    view = Spans(lambda spans, _: ended.extend(spans))
    feed_all(view, log)
    return ended


def killed(seed: int) -> MiniCluster:
    """A worker of big dies; big trains again."""
    cluster = trained(seed)
    cluster.train("big")
    victim = cluster.state.tasks["big"].membership.members[1]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.now_us += 2 * SECOND_US
    cluster.run()
    cluster.now_us += 6 * SECOND_US
    cluster.train("big")
    return cluster


def test_incident_is_one_trace_from_fault_to_next_step() -> None:
    cluster = killed(1)
    (closed,) = cluster.state.closed_incidents
    (root,) = [span for span in spans_of(cluster.log) if span.about.get("unicron.incident")]
    mine = [span for span in spans_of(cluster.log) if span.trace == root.trace]
    named = {span.name: span for span in mine}
    assert root.name == "incident process_exit" and not root.parent and root.error.startswith("process_exit: ")
    assert root.about["unicron.task"] == "big" and root.about["unicron.worker"] == closed.worker
    assert (root.start_us, named[DETECTION].end_us) == (closed.occurred_us, closed.detected_us)
    assert named[DECISION].start_us == closed.detected_us and named[DECISION].end_us == named[REGROUPING].start_us
    assert (named[REGROUPING].end_us, named[FIRST_STEP].start_us) == (closed.resumed_us, closed.resumed_us)
    assert named[FIRST_STEP].end_us == root.end_us > closed.resumed_us
    regrouped = [span for span in mine if span.name == "WorkerJoinedGroup"]
    assert regrouped and all(span.parent == named[REGROUPING].span for span in regrouped)
    assert any(span.name == "worker start" for span in mine), "that of the new worker is in it"
    assert len({span.span for span in mine}) == len(mine)


@pytest.mark.parametrize("seed", range(12))
def test_trace_of_closed_incident_is_connected(seed: int) -> None:
    cluster = trained(seed)
    for _ in random_life(cluster, seed):
        pass
    found = spans_of(cluster.log)
    assert found == spans_of(cluster.log), "numbers follow from the log alone"
    known = {(span.trace, span.span) for span in found}
    assert len(known) == len(found)
    for span in found:
        assert span.start_us <= span.end_us and (not span.parent or (span.trace, span.parent) in known)
    told = {span.about["unicron.incident"] for span in found if "unicron.incident" in span.about}
    assert told <= {incident.id for incident in cluster.state.closed_incidents}


def test_command_outside_incident_is_own_trace() -> None:
    cluster = trained(2)
    alone = [span for span in spans_of(cluster.log) if not span.parent]
    starts = [span for span in alone if span.name == "worker start"]
    assert starts and {span.about["unicron.task"] for span in starts} == {"big", "small"}
    assert all(span.end_us > span.start_us and not span.error for span in starts)
    assert len({span.trace for span in alone}) == len(alone)


def test_failed_command_span_tells_reason() -> None:
    cluster = trained(2)
    commands = [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, v.Command)]
    state, ended = ClusterState(), list[Span]()
    view = Spans(lambda spans, _: ended.extend(spans))
    for step in steps(cluster.log):
        _, entry, state = step
        event = entry.envelope.event
        if isinstance(event, v.CommandApplied) and event.command_id == commands[0].command_id:
            break
        view.feed(step)
    ended.clear()
    failed = v.CommandFailed(node=commands[0].node, command_id=commands[0].command_id, reason="no memory")
    view.feed(LogStep(state, RecordedEvent(9, state.now_us, _with(entry, failed)), state))
    (span,) = ended
    assert span.error == "no memory" and span.about["unicron.node"] == commands[0].node


def _with(entry: RecordedEvent, event: v.AnyEvent) -> Any:
    from msgspec.structs import replace

    return replace(entry.envelope, event=event)


def test_spans_count_phases_for_metrics() -> None:
    spans, cluster = Spans(), killed(1)
    feed_all(spans, cluster.log)
    (closed,) = cluster.state.closed_incidents
    assert spans.phases[DETECTION] == (1, closed.detected_us - closed.occurred_us)
    assert all(times == 1 for times, _ in spans.phases.values())


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, asyncio.Queue[Any]]]:
    """A receiver of OTLP over HTTP: its address, and what it is sent, an ExportTraceServiceRequest each."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: asyncio.Queue[Any] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        got.put_nowait(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", got
    finally:
        await runner.cleanup()


async def send(url: str, spans: list[Span]) -> None:
    from unicrond.service.export.tracing import Tracing

    tracing = Tracing(url)
    running = asyncio.create_task(tracing.run())
    await asyncio.sleep(0)
    tracing.ended(spans)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def attributes(of: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in of.attributes}


async def test_spans_reach_collector() -> None:
    async with collector() as (url, got):
        mine = spans_of(killed(1).log)
        await send(url, mine)
        request = await asyncio.wait_for(got.get(), 10)
    (resource,) = request.resource_spans
    assert attributes(resource.resource)["service.name"] == "unicrond"
    sent = [span for scope in resource.scope_spans for span in scope.spans]
    assert {int.from_bytes(span.span_id) for span in sent} == {span.span for span in mine}
    (root,) = [span for span in sent if span.name == "incident process_exit"]
    (ours,) = [span for span in mine if span.name == root.name]
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (ours.start_us * 1000, ours.end_us * 1000)
    assert int.from_bytes(root.trace_id) == ours.trace and not root.parent_span_id


async def test_query_finds_incident_and_worker_spans() -> None:
    async with collector() as (url, got):
        incident = spans_of(killed(1).log)
        (root,) = [span for span in incident if span.name == "incident process_exit"]
        worker = root.about["unicron.worker"]
        await send(url, incident)
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url,
            "OTEL_RESOURCE_ATTRIBUTES": resource_attributes("team=a", launch(worker)),
        }
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", A_STEP, env=environment)
        assert await asyncio.wait_for(program.wait(), 60) == 0
        requests = [got.get_nowait() for _ in range(got.qsize())]
    found = {
        span.name
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if (attributes(resource.resource) | attributes(span)).get("unicron.worker") == worker
    }
    assert {"incident process_exit", "optimizer step"} <= found


#: A program with spans of its own, by OpenTelemetry's own SDK.
A_STEP = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

spans = TracerProvider()
spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
with spans.get_tracer("training").start_as_current_span("optimizer step"):
    pass
spans.shutdown()
"""


def launch(worker: str) -> Launch:
    return Launch(
        worker=worker, task="big", node="n1", address="", agent_socket="", replica=0, shard=0,
        store=v.StoreAddress(host="10.0.0.1", port=1), spec=killed(1).state.tasks["big"].spec,
    )  # fmt: skip


def test_configuration_refuses_bad_traces_url() -> None:
    with pytest.raises(ConfigError, match="traces_url: 'collector:4318' is not an http address"):
        check(Config(traces_url="collector:4318"), "unicron.yaml")


def test_worker_spans_share_attribute_names() -> None:
    assert resource_attributes("", launch("big.7")) == "unicron.task=big,unicron.worker=big.7,unicron.node=n1"
    given = resource_attributes("team=a,unicron.node=mine", launch("big.7"))
    assert given == "team=a,unicron.node=mine,unicron.task=big,unicron.worker=big.7"
