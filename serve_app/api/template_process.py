"""Renders chat templates in a separate process with limits.

A template is a program that comes with a model, and its running time depends on the messages. An endless loop in a
thread cannot be stopped. A single C call, such as `9**9**9` or a repeated string, can hold the GIL or exhaust memory.
Kernel limits can end a separate process, which also never blocks the event loop.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading

from cluster.errors import EngineError
from serve_app.api.chat_template import Rendering, TemplateFailure
from serve_app.api.template_worker import HEAD, MEMORY_BYTES, SIZE
from serve_app.api.template_worker import __name__ as PROGRAM

CPU_S = 1.0  # seconds of processor time per conversation
ANSWER_TIMEOUT_S = 60.0  # seconds of wall-clock time, including the program's start on a busy machine
STOP_TIMEOUT_S = 5.0


class TemplateProcess:
    """Starts the renderer, assigns a worker to each caller, and replaces killed workers. Thread-safe."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        """Starts the program, which takes seconds. `cpu_s` limits the processor time per rendering."""
        self._cpu_s = cpu_s
        self._idle: list[socket.socket] = []  # sockets of idle workers
        self._starting = threading.Lock()
        self._program, self._control = _start(cpu_s)

    def __call__(self, rendering: Rendering) -> str:
        """Returns the rendered text. Raises TemplateFailure if the template raises or exceeds a limit."""
        try:
            request = json.dumps(rendering.as_json()).encode()
        except RecursionError:
            raise TemplateFailure("the messages are nested too deeply; reduce the nesting") from None
        worker = self._worker()
        try:
            text = self._exchange(worker, request)
        except BaseException:  # workers end at their first failure
            worker.close()
            raise
        self._idle.append(worker)
        return text

    def close(self) -> None:
        """Stops the program and its workers."""
        self._control.close()
        while self._idle:
            self._idle.pop().close()
        try:
            self._program.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()

    def _worker(self) -> socket.socket:
        """Returns the socket of an idle or new worker."""
        while self._idle:
            try:
                worker = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if not select.select((worker,), (), (), 0)[0]:
                return worker
            worker.close()  # readable without a request: the worker has ended
        parent_socket, child_socket = socket.socketpair()
        with child_socket, self._starting:
            try:
                socket.send_fds(self._control, (b"w",), (child_socket.fileno(),))
            except OSError:  # the program was killed; restart it once
                self._control.close()
                self._program.wait()
                self._program, self._control = _start(self._cpu_s)
                socket.send_fds(self._control, (b"w",), (child_socket.fileno(),))
        parent_socket.settimeout(ANSWER_TIMEOUT_S)
        return parent_socket

    def _exchange(self, worker: socket.socket, request: bytes) -> str:
        """Returns the rendered text. Raises TemplateFailure for a reported error or a killed worker."""
        limit_failure = TemplateFailure(
            f"rendering takes more than {self._cpu_s:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
        )
        try:
            worker.sendall(SIZE.pack(len(request)) + request)
            with worker.makefile("rb") as reply:
                head = reply.read(HEAD.size)
                if len(head) < HEAD.size:
                    raise limit_failure
                is_text, length = HEAD.unpack(head)
                body = reply.read(length)
        except TimeoutError as error:
            raise EngineError(
                f"the process that renders chat templates did not answer within {ANSWER_TIMEOUT_S:g} s"
            ) from error
        except ConnectionError as error:
            raise limit_failure from error
        if len(body) < length:
            raise limit_failure
        if not is_text:
            raise TemplateFailure(body.decode())
        return body.decode()


def _start(cpu_s: float) -> tuple[subprocess.Popen[bytes], socket.socket]:
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        command = (sys.executable, "-P", "-m", PROGRAM, str(child_socket.fileno()), str(cpu_s))
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(child_socket.fileno(),), env=environment
        )
    return program, parent_socket
