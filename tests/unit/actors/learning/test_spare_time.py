"""Tests the rests of a trainer in the background."""

from actors.learning.spare_time import SpareTime


class Machine:
    """Simulated core: passes take 0.1 s of processor time, and longer by the share that others take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        self.rests: list[float] = []
        self.spare_time = SpareTime(self.rest, clock=lambda: self.now, cpu_clock=lambda: self.cpu_s)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def run(self, passes: int, share: float) -> None:
        """Runs passes, each with this share of the core's time."""
        for _ in range(passes):
            self.spare_time.pause()
            self.cpu_s += 0.1
            self.now += 0.1 / share


def test_an_idle_core_is_used_without_rests() -> None:
    machine = Machine()
    machine.run(100, share=0.97)
    assert not machine.rests


def test_rests_on_a_contended_core_grow_until_passes_take_a_percent_of_it() -> None:
    machine = Machine()
    machine.run(40, share=0.5)
    assert machine.rests == sorted(machine.rests)
    before, began = machine.cpu_s, machine.now
    machine.run(40, share=0.5)
    assert (machine.cpu_s - before) / (machine.now - began) < 0.011


def test_the_trainer_returns_to_full_speed_once_the_core_is_idle() -> None:
    machine = Machine()
    machine.run(40, share=0.5)
    machine.run(2, share=1.0)
    machine.rests.clear()
    machine.run(40, share=1.0)
    assert not machine.rests
