"""TensorBoard events, if tensorboardX is installed."""

import importlib.util
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventsFile:
    """One file of events, written without a buffer.

    tensorboardX's own writer is a thread that keeps data refused by a full disk, and
    reports that only when the process ends.

    Args:
      folder: folder of a run's events; created if missing.
      resume_step: events of later steps in earlier files are discarded.
    """

    def __init__(self, folder: Path, resume_step: int):
        self._file = None
        if importlib.util.find_spec("tensorboardX") is None:
            return
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (folder / name).open("wb", buffering=0)
        self._add(file_version="brain.Event:2")
        self._add(step=resume_step + 1, session_log={"status": "START"})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        if self._file is not None:
            from tensorboardX.summary import scalar

            for name, value in values.items():
                self._add(step=step, summary=scalar(name, value))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _add(self, **fields: Any) -> None:
        """Writes an event framed by its length and checksums, as in a TFRecord."""
        if self._file is None:
            return
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c

        messages: Any = event_pb2
        event = messages.Event(wall_time=time.time(), **fields)
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.write(length + sums[0] + data + sums[1])
