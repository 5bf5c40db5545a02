"""Times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def format_time(time_us: int) -> str:
    """Write microseconds since the epoch as RFC 3339 in UTC, or as the bare number where no calendar reaches."""
    try:
        time = EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_the_second(time_us: int) -> str:
    """Write the same without the fraction: for times that people have given."""
    text = format_time(time_us)
    return f"{text.partition('.')[0]}Z" if text.endswith("Z") else text
