"""Event files as TensorBoard reads them."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


def scalars(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """What TensorBoard would read, with its checks of every record."""
    read = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            length = data[:8]
            (size,) = struct.unpack("<Q", length)
            record = data[12 : 12 + size]
            assert struct.unpack("<I", data[8:12]) == (masked_crc32c(length),)
            assert struct.unpack("<I", data[12 + size : 16 + size]) == (masked_crc32c(record),)
            read.append(Event.FromString(record))
            data = data[16 + size :]
    first, started, *events = read
    assert first.file_version == "brain.Event:2"
    assert started.session_log.status == SessionLog.START
    return [(started.step, {})] + [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
    ]
