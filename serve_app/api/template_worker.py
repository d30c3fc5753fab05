"""The program that renders chat templates: `python -m serve_app.api.template_worker FD CPU_S`.

It receives sockets over the socket FD, and forks a worker for each. A worker answers requests on its socket in order,
each within CPU_S seconds of processor time and MEMORY_BYTES of memory. The kernel enforces both limits. The program and
its workers end when the parent closes the sockets.
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

MEMORY_BYTES = 512 << 20  # memory limit per worker
NICENESS = 5  # gives priority to model computation
SIZE = struct.Struct("=Q")  # request header: size in bytes
HEAD = struct.Struct("=?Q")  # reply header: whether rendering succeeded, size in bytes


def main() -> None:
    """Forks workers until the parent closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # makes the kernel reap ended workers
    gc.freeze()  # keeps memory pages shared with the workers
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
    """Renders until the parent closes the socket or a template fails; the process then ends, to discard its state."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    is_text = True
    with connection.makefile("rb") as requests, connection.makefile("wb") as replies:
        while is_text and (request := _next(requests)):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process even inside C code
            is_text, body = _rendered(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(HEAD.pack(is_text, len(body)))
            replies.write(body)
            replies.flush()


def _next(requests: BinaryIO) -> bytes:
    """Returns the next request; empty if the parent has closed the socket."""
    size = requests.read(SIZE.size)
    return requests.read(SIZE.unpack(size)[0]) if len(size) == SIZE.size else b""


def _rendered(request: bytes) -> tuple[bool, bytes]:
    """Returns whether rendering succeeded, and the text or the error."""
    try:
        return True, render_here(Rendering(**json.loads(request))).encode()
    except MemoryError:
        return False, b"it needs more memory than a chat template may"
    except Exception as error:  # noqa: BLE001  # templates may raise anything; the client gets the message
        return False, describe(error).encode(errors="replace")


if __name__ == "__main__":
    main()
