"""The program that renders chat templates: `python -m serve_app.api.template_worker FD CPU_S`.

It reads sockets from the socket FD, and forks a worker for each. A worker answers one request after the other on its
socket, each within CPU_S seconds of processor time and MEMORY_BYTES of memory. The kernel enforces both limits, so a
template cannot exceed them whatever it computes. The program ends, and so do its workers, when the other side closes
the sockets.
"""

import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import BinaryIO

from serve_app.api.chat_template import Rendering, describe, render_here

MEMORY_BYTES = 512 << 20  # bytes of one worker
NICENESS = 5  # templates yield to model computation
SIZE = struct.Struct("=Q")  # size prefix of a request
HEAD = struct.Struct("=?Q")  # prefix of a reply: whether it is text rather than an error, and its length in bytes


def main() -> None:
    """Forks workers until the parent closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    gc.freeze()  # keeps pages shared with the workers
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            received, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not received:
                return
            if os.fork() == 0:
                control.close()
                _work(socket.socket(fileno=descriptors[0]), float(sys.argv[2]))
                os._exit(0)
            os.close(descriptors[0])


def _work(connection: socket.socket, cpu_s: float) -> None:
    """Renders until the parent leaves or a template fails; ending the process discards what a failure left behind."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    is_text = True
    with connection.makefile("rb") as requests, connection.makefile("wb") as replies:
        while is_text and (request := _next(requests)):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process even inside C code
            is_text, body = _rendered(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(HEAD.pack(is_text, len(body)))
            replies.write(body)
            replies.flush()


def _next(requests: BinaryIO) -> bytes:
    """Returns the next request; empty if the parent has left."""
    size = requests.read(SIZE.size)
    return requests.read(SIZE.unpack(size)[0]) if len(size) == SIZE.size else b""


def _rendered(request: bytes) -> tuple[bool, bytes]:
    """Returns whether rendering succeeded, with the text or the error."""
    try:
        return True, render_here(Rendering(**json.loads(request))).encode()
    except MemoryError:
        return False, b"it needs more memory than a chat template may"
    except Exception as error:  # noqa: BLE001  # templates may raise anything; the client gets the message
        return False, describe(error).encode(errors="replace")


if __name__ == "__main__":
    main()
