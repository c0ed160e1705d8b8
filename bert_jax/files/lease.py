"""Leases, which let only one run or build at a time write to a directory.

A lease is a small file in the directory, `lease-1.json`, that names the process that holds the
lease. The holder renews the file every few seconds. To take over a lease, another process creates
the file with the next number (`lease-2.json`), which only one process can do, and removes the older
files. A holder whose file is gone has lost the lease and ends before it writes anything more.
"""

import contextlib
import dataclasses
import datetime
import getpass
import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.files.claims import Claims
from bert_jax.files.untrusted.json_file import parse_json

EXIT_CODE = 7
_log = logging.getLogger("bert_jax")


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of a lease, in seconds."""

    beat: float = 10.0
    """Time between two renewals."""
    lapse: float = 90.0
    """Time without renewal until a takeover: more than the 60 s by which network disks may lag."""
    patience: float = 300.0
    """Time to wait for a holder on another machine; a run that is being stopped needs less."""
    poll: float = 1.0
    """Time between two reads of another holder's lease."""


class Lease:
    """The exclusive right to write to a directory. A thread renews it."""

    def __init__(
        self, claims: Claims, name: str, times: Times, *, say: Callable[[str], None],
        exit: Callable[[int], Any] = os._exit, writer: str = "run", place: str = "work directory",
    ):  # fmt: skip
        """Prepare a lease on a directory. Call `take` to acquire the lease.

        `name` (path or URL), `writer` and `place` (nouns) are for messages. `say` receives messages
        about waiting, and `exit` ends the process when the lease is lost.
        """
        self._claims, self._name, self._times, self._exit = claims, name, times, exit
        self._say, self._writer, self._place = say, writer, place
        self._own = json.dumps(_myself()).encode()
        self._number = 0
        self._content: bytes | None = None
        """Content of another holder's claim, as last read. `_version` is the claim's version."""
        self._version: Any = None
        self._since = self._seen = 0.0
        """Times at which the other holder and its last renewal were first seen (`monotonic`)."""
        self._beats = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def take(self) -> bool:
        """Try to take the lease. If this fails, return False; try again after `Times.poll`.

        Raise a UserError if the holder is on this machine, or still renews after `Times.patience`.
        """
        numbers = self._claims.numbers()
        there = {each: claim for each in numbers if (claim := self._claims.read(each))}
        if there and not self._is_over(*there[max(there)]):
            return False
        over = {each: content for each, (content, _) in there.items()}
        number = max(there, default=0) + 1
        if not self._claims.create(number, self._own):
            return False
        others = [each for each in self._claims.numbers() if each != number]
        now = {each: claim[0] for each in others if (claim := self._claims.read(each))}
        if any(over.get(each) != content for each, content in now.items()):
            # Another process created a claim meanwhile. Both processes give way and try again.
            self._claims.remove(number)
            time.sleep(random.random() * self._times.poll)
            return False
        for each in over:
            self._claims.remove(each)
        self._number = number
        self._thread.start()
        return True

    def confirm(self) -> None:
        """Renew the lease. If another process has taken it over, end this process with code 7."""
        with self._lock:
            if not self._number or self._done.is_set():
                return
            try:
                held = self._claims.renew(self._number, self._own)
            except Exception as error:  # any network error: the next renewal tries again
                _log.warning("The lease on %s cannot be renewed: %s", self._name, error)
                return
        if held:
            return
        text = (
            f"bert-jax: {self._name} was taken over by another {self._writer}, because this "
            f"process was suspended or cut off for more than {self._times.lapse:g} s. This process "
            f"writes nothing more and ends with exit code {EXIT_CODE}\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))  # `print` could wait for a lock
        self._exit(EXIT_CODE)

    def release(self) -> None:
        """Give up the lease and stop renewing it."""
        with self._lock:
            number, self._number = self._number, 0
        self._done.set()
        if not number:
            return
        self._thread.join(self._times.beat)
        try:
            claim = self._claims.read(number)
            if claim is not None and claim[0] == self._own:
                self._claims.remove(number)
        except Exception as error:
            _log.warning(
                "The lease on %s cannot be removed and lapses after %g s: %s",
                self._name, self._times.lapse, error,
            )  # fmt: skip

    def _beat(self) -> None:
        while not self._done.wait(self._times.beat):
            self.confirm()

    def _is_over(self, content: bytes, version: Any) -> bool:
        """Return true if a claim's holder is gone; raise a UserError for the reasons in `take`."""
        now, holder = time.monotonic(), dict[str, Any]()
        with contextlib.suppress(UserError):  # the writer may have died while it wrote the claim
            found = parse_json(content, where="lease")
            holder = found if isinstance(found, dict) else {}
        if content != self._content:
            if lives := _lives_here(holder):
                raise UserError(self._refusal(holder, lives))
            if lives is not None:
                self._say(
                    f"{self._name}: {_described(holder)} has ended; this {self._writer} goes on"
                )
                return True
            self._content, self._version, self._beats = content, version, 0
            self._since = self._seen = now
            self._say(
                f"{self._name} is in use by {_described(holder)}. Waiting until that process ends "
                f"or shows no sign of life for {self._times.lapse:g} s"
            )
        elif version != self._version:
            self._version, self._seen, self._beats = version, now, self._beats + 1
        if now - self._seen > self._times.lapse:
            self._say(f"{self._name}: no sign of life for {self._times.lapse:g} s; taking over")
            return True
        if now - self._since > self._times.patience and self._beats:
            seen = now - self._seen
            state = f"The last sign of life was {seen:.0f} s ago; {self._times.lapse:g} s after "
            raise UserError(self._refusal(holder, f"{state}it, the directory is free"))
        return False

    def _refusal(self, holder: dict[str, Any], state: str) -> str:
        return (
            f"the {self._place} {self._name} is in use by {_described(holder)}. {state}. Wait for "
            f"the end of that {self._writer}, stop it, or choose another {self._place}"
        )


def _myself() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container that has no entry for this user
        user = f"user {os.getuid()}"
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "user": user,
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(), "process_start": _process(os.getpid())[1], "token": uuid.uuid4().hex,
    }  # fmt: skip


def machine() -> str:
    """Return an ID of this boot of this machine or container, within which pids are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return (
        f"process {holder.get('pid')} of {holder.get('user')} on {holder.get('host')} (since "
        f"{holder.get('since')})"
    )


def _lives_here(holder: dict[str, Any]) -> str | None:
    """Describe a holder on this machine; "" if the holder has ended, None if it is elsewhere."""
    pid = holder.get("pid")
    if holder.get("machine") != machine() or not isinstance(pid, int) or pid < 1:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:  # another user's process
        pass
    state, start = _process(pid)
    if state in ("Z", "X") or (start and holder.get("process_start", "") != start):
        return ""
    if state == "T":
        return "That process is stopped; `kill -CONT` continues and `kill -KILL` ends it"
    return "The directory is free as soon as that process ends"


def _process(pid: int) -> tuple[str, str]:
    """Return a process's state and start time in ticks since boot, or ("", "") without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
