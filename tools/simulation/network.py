"""Virtual time, and processes connected by streams with the guarantees of gRPC.

A process may die, or hang and later handle all pending events. A stream delivers frames in order until it breaks; a
frame holds all messages sent to one peer at one instant. A break loses the frames in flight, and each end notices it
after its own delay. `NetworkFaults` adds faults that gRPC excludes but the schedulers tolerate: loss, duplication and
reordering of frames between drafters and targets, duplication of a router's frames, and late arrival of frames from a
router's broken stream.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from protos.messages import Hello, LiveSession, Message

Action = Callable[[], None]
ENDLESS_LOOP_EVENTS = 200_000  # number of events at one instant that indicates an endless loop


class Clock:
    """Virtual clock that jumps from event to event; simultaneous events run in scheduling order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # number of events so far
        self._due: list[tuple[float, int, Action]] = []
        self._order = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._order), action))

    def after(self, delay: float, action: Action) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._order), action))

    def run(self) -> int:
        """Runs all events and returns their number. Raises AssertionError if time stands still."""
        events_now = self.events
        due = self._due
        pop = heapq.heappop
        while due:
            time, _, action = pop(due)
            if time > self.now:
                self.now = time
                events_now = self.events
            action()
            self.events += 1
            assert self.events - events_now < ENDLESS_LOOP_EVENTS, f"time stands still at {self.now} s"
        return self.events


REDIAL_S = 0.05
KEEPALIVE_S = 5.0  # seconds before peers give up a hanging process
SLOWNESS = 10.0

Frame = Sequence[Message]


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Faults that gRPC streams exclude but the schedulers tolerate."""

    lost: float = 0.0  # lost share of frames between drafters and targets
    duplicated: float = 0.0  # duplicated share of all frames
    max_delay_s: float = 0.0  # maximum extra seconds, drawn per frame between drafter and target
    stale_frames: bool = False  # True: a router still receives frames of a broken stream

    def __post_init__(self) -> None:
        assert self.lost + self.duplicated <= 1, "shares of lost and duplicated frames exceed 1"


NO_NETWORK_FAULTS = NetworkFaults()


class Process:
    """Process that receives events unless it hangs or has died."""

    def __init__(self, address: str, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self.alive = True
        self.hangs = False
        self.links: list[SimulatedLink] = []  # links with this process as client or server
        self._deferred: list[Action] = []
        self._stalled_until = 0.0
        self._slow_until = 0.0
        self._slowness = 1.0

    def deliver(self, action: Action) -> None:
        if self.hangs:
            self._deferred.append(action)
        elif self.alive:
            action()

    def after(self, delay: float, action: Action) -> None:
        """Schedules an action of the process, which is skipped if the process has died."""
        self.clock.after(delay, partial(self.deliver, action))

    def die(self) -> None:
        self.alive = False
        self.hangs = False
        self._deferred.clear()
        for link in list(self.links):
            link.cut()

    def hang(self, seconds: float) -> None:
        self.hangs = True
        self.clock.after(seconds, self._wake)
        self.clock.after(KEEPALIVE_S, self._time_out)

    def stall(self, seconds: float) -> None:
        """Delays computations until `seconds` from now; messages are still received."""
        self._stalled_until = self.clock.now + seconds

    def slow_down(self, seconds: float) -> None:
        """Multiplies the duration of computations by SLOWNESS for `seconds` seconds."""
        self._slow_until = self.clock.now + seconds
        self._slowness = SLOWNESS

    @property
    def slowness(self) -> float:
        """Returns the factor on the duration of a computation that begins now."""
        return self._slowness if self.clock.now < self._slow_until else 1.0

    @property
    def stalls_s(self) -> float:
        """Returns the delay, in seconds, of a computation that begins now."""
        return max(0.0, self._stalled_until - self.clock.now)

    def _wake(self) -> None:
        self.hangs = False
        deferred = self._deferred
        self._deferred = []
        for action in deferred:
            self.deliver(action)

    def _time_out(self) -> None:
        if self.hangs:
            for link in list(self.links):
                link.cut()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Handlers of a process for incoming streams."""

    process: Process
    up: Callable[[Hello, "Wire"], str]  # returns the server's name for the stream
    frame: Callable[[str, Frame], None]
    down: Callable[[str], None]


class _Stream:
    """One connection of a link."""

    def __init__(self) -> None:
        self.cut = False
        self.name: str | None = None  # server's name for the stream; None before the greeting and after the break
        self.out: Wire | None = None


class Wire:
    """One direction of a stream."""

    def __init__(
        self, network: "Network", stream: _Stream, to: Process, deliver: Callable[[Frame], None], ordered: bool
    ) -> None:
        self._clock = network.clock
        self._delays = network.delays(ordered)
        self._accepts_stale_frames = ordered and network.network_faults.stale_frames
        self._stream = stream
        self._to = to
        self._deliver = deliver
        self._frame: list[Message] = []
        self._frame_at = -1.0

    def put(self, message: Message) -> None:
        """Adds a message to the frame of this instant."""
        now = self._clock.now
        if self._frame_at == now:
            self._frame.append(message)
            return
        frame = [message]
        self._frame = frame
        self._frame_at = now
        for delay in self._delays():
            self._clock.after(delay, partial(self._arrive, frame))

    def _arrive(self, frame: list[Message]) -> None:
        if frame is self._frame:
            self._frame_at = -1.0  # with zero delay, further messages of this instant form a new frame
        if not self._stream.cut or self._accepts_stale_frames:
            self._to.deliver(partial(self._deliver, frame))


class SimulatedLink:
    """Stream that reopens after each break until it is closed."""

    def __init__(
        self,
        network: "Network",
        client: Process,
        endpoint: Endpoint,
        live: Callable[[], Sequence[LiveSession]],
        on_up: Callable[[], None],
        on_frame: Callable[[Frame], None],
        on_down: Callable[[], None],
        ordered: bool = True,
    ) -> None:
        self.client = client
        self.server = endpoint.process
        self.is_up = False
        self._network = network
        self._endpoint = endpoint
        self._live = live
        self._ordered = ordered
        self._accepts_stale_frames = ordered and network.network_faults.stale_frames
        self._on_up = on_up
        self._on_frame = on_frame
        self._on_down = on_down
        self._closed = False
        self._stream: _Stream | None = None  # None while disconnected
        client.links.append(self)
        self.server.links.append(self)
        self._dial()

    def send(self, message: Message) -> None:
        """Sends a message if the link is up, else drops it."""
        if self.is_up:
            assert self._stream is not None
            assert self._stream.out is not None
            self._stream.out.put(message)

    def close(self) -> None:
        """Closes the stream from the client's side."""
        self._closed = True
        self.client.links.remove(self)
        self.server.links.remove(self)
        if self._stream is not None:
            self._on_client_end(self._stream)

    def cut(self) -> None:
        """Breaks the stream: no more frames arrive, and each end notices after its own delay."""
        stream = self._stream
        if stream is None:
            return
        stream.cut = True
        self.client.after(self._network.notice_s(), partial(self._on_client_end, stream))
        self.server.after(self._network.notice_s(), partial(self._on_server_end, stream))

    # ------------------------------------------------------------ life of a stream

    def _dial(self) -> None:
        if self._closed or not self.server.alive:
            return
        self._stream = stream = _Stream()
        hello = Hello(self.client.address, "", "", tuple(self._live()))
        self.server.after(self._network.hop_s, partial(self._greet, stream, hello))

    def _greet(self, stream: _Stream, hello: Hello) -> None:
        if stream.cut:
            return
        back = Wire(self._network, stream, self.client, partial(self._on_client_frame, stream), self._ordered)
        stream.name = self._endpoint.up(hello, back)
        self.client.after(self._network.hop_s, partial(self._welcome, stream))

    def _welcome(self, stream: _Stream) -> None:
        if stream.cut or stream is not self._stream:
            return
        stream.out = Wire(self._network, stream, self.server, partial(self._on_server_frame, stream), self._ordered)
        self.is_up = True
        self._on_up()

    def _on_client_end(self, stream: _Stream) -> None:
        if stream is not self._stream:
            return
        if not stream.cut:
            stream.cut = True
            self.server.after(self._network.notice_s(), partial(self._on_server_end, stream))
        self._stream = None
        if self.is_up:
            self.is_up = False
            self._on_down()
        self.client.after(REDIAL_S, self._dial)

    def _on_server_end(self, stream: _Stream) -> None:
        if stream.name is not None:
            name = stream.name
            stream.name = None
            self._endpoint.down(name)

    # ------------------------------------------------------------ frames

    def _on_client_frame(self, stream: _Stream, frame: Frame) -> None:
        if (self.is_up and stream is self._stream) or self._accepts_stale_frames:
            self._on_frame(frame)

    def _on_server_frame(self, stream: _Stream, frame: Frame) -> None:
        if stream.name is not None:
            self._endpoint.frame(stream.name, frame)


class Network:
    """Draws the delays of messages."""

    def __init__(self, clock: Clock, hop_s: float, network_faults: NetworkFaults, rng: random.Random) -> None:
        self.clock = clock
        self.hop_s = hop_s
        self.network_faults = network_faults
        self._rng = rng

    def notice_s(self) -> float:
        """Draws the seconds until one end notices a broken stream."""
        return self._rng.uniform(self.hop_s, 4 * self.hop_s)

    def delays(self, ordered: bool) -> Callable[[], list[float]]:
        """Returns a function that draws one delay per delivered copy of a frame."""
        if self.network_faults == NO_NETWORK_FAULTS:
            once = [self.hop_s]
            return lambda: once
        return self._ordered_delays if ordered else self._unordered_delays

    def _ordered_delays(self) -> list[float]:
        return [self.hop_s] * (1 + (self._rng.random() < self.network_faults.duplicated))

    def _unordered_delays(self) -> list[float]:
        lost = self.network_faults.lost
        duplicated = self.network_faults.duplicated
        copies = self._rng.choices((0, 1, 2), weights=(lost, 1 - lost - duplicated, duplicated))[0]
        return [self.hop_s + self._rng.uniform(0.0, self.network_faults.max_delay_s) for _ in range(copies)]
