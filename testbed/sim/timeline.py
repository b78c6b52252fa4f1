"""The timeline as Chrome trace JSON, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", complete events ("X") with microseconds, one thread a track.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testbed.files import replacing
from testbed.sim.node import Row

TRACKS = ("compute", "host_read", "host_write", "disk_read", "disk_write")


def chrome_trace(rows: Iterable[Row], process: str = "twin") -> dict[str, Any]:
    """The trace as a JSON object: names of process and tracks, then one event a row."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": process}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(TRACKS, 1)
        ),
    ]
    for row in rows:
        events.append(
            {
                "ph": "X",
                "name": row.name,
                "cat": row.track,
                "pid": 1,
                "tid": TRACKS.index(row.track) + 1,
                "ts": row.start_us,
                "dur": row.us,
                "args": {"step": row.step, "bytes": row.bytes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(rows: Iterable[Row], path: Path | str, process: str = "twin") -> None:
    """Writes the trace whole or not at all; OSError where the place can't be written."""
    with replacing(Path(path), make_folder=False) as partial:
        partial.write_text(json.dumps(chrome_trace(rows, process)), encoding="utf-8")
