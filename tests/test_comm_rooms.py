"""Memory for encoded vectors is used again by whoever asks next, and by nobody while a view of it lives."""

import gc
import random
import threading

import pytest
import torch

from diloco.comm.codec import rooms as module
from diloco.comm.codec.rooms import (
    IDLE_TURNS,
    MARGIN,
    ROUND_ROOMS,
    WORTH_MAPPING,
    Rooms,
    mapped,
    on_host,
    prepare,
    room_for,
)

SIZE = 2 * WORTH_MAPPING
VIEWS = {
    "slice": lambda room: room[5:9],
    "other type": lambda room: room.view(torch.float32)[1:],
    "numpy": lambda room: room.numpy()[3:],
    "numpy of a slice": lambda room: room[SIZE // 2 :].numpy(),
    "memoryview": lambda room: memoryview(room.numpy())[7:],
    "storage": lambda room: room.untyped_storage(),
    "tensor of a memoryview": lambda room: torch.frombuffer(memoryview(room.numpy()), dtype=torch.uint8),
    "reshaped": lambda room: room.view(2, -1).transpose(0, 1),
}


def free(rooms):
    """The sizes of what is not in use."""
    rooms._gather()
    return [len(memory) for _, memory in rooms._free]


def first_bytes(view):
    if isinstance(view, memoryview | torch.UntypedStorage):
        return view[:4]
    return torch.as_tensor(view).contiguous().view(-1).view(torch.uint8)[:4].tolist()


@pytest.mark.parametrize("view", VIEWS)
def test_memory_comes_round_when_its_last_view_is_gone(view):
    rooms = Rooms()
    room = rooms.take(SIZE).fill_(1)
    place, seen = room.data_ptr(), VIEWS[view](room)
    del room
    other = rooms.take(SIZE).fill_(2)
    assert free(rooms) == [] and other.data_ptr() != place
    assert all(byte == 1 for byte in first_bytes(seen))
    del seen
    assert free(rooms) == [SIZE]
    again = rooms.take(SIZE - 1)
    assert again.data_ptr() == place and len(again) == SIZE - 1 and free(rooms) == []


def test_unused_memory_never_makes_it_more_than_was_in_use_at_once():
    rooms, held, most = Rooms(), [], 0
    dice = random.Random(1)
    for _ in range(300):
        if held and dice.random() < 0.5:
            held.pop(dice.randrange(len(held)))
        else:
            held.append(rooms.take(dice.randrange(SIZE, 8 * SIZE)))
        unused, most = sum(free(rooms)), max(most, rooms.used)
        assert rooms.used + unused <= most and rooms.used >= sum(map(len, held))
    held.clear()
    assert free(rooms) and rooms.used == 0


def test_what_is_not_used_for_a_while_goes_back_to_the_operating_system():
    rooms = Rooms()
    rooms.take(SIZE)
    for _ in range(IDLE_TURNS):
        rooms.next_turn()
        assert free(rooms) == [SIZE]
    rooms.next_turn()
    assert free(rooms) == [] and rooms.used == 0


def test_memory_that_was_needed_once_goes_although_others_of_its_size_are_used():
    rooms = Rooms()
    del [rooms.take(SIZE) for _ in range(5)][:]
    for _ in range(IDLE_TURNS + 2):
        held = [rooms.take(SIZE) for _ in range(2)]
        assert len(held) == 2
        del held
        rooms.next_turn()
    assert free(rooms) == [SIZE] * 2


def test_much_larger_memory_is_left_for_others():
    rooms = Rooms()
    rooms.take(8 * SIZE)
    room = rooms.take(SIZE)
    assert rooms.used == len(room) == SIZE


def test_threads_that_take_and_let_go_never_share_memory():
    rooms, wrong = Rooms(), []

    def work(mark):
        dice = random.Random(mark)
        for _ in range(100):
            room = rooms.take(dice.randrange(SIZE, 2 * SIZE))
            room[::4096] = mark
            view = room[::4096].numpy()
            del room
            if dice.random() < 0.1:
                gc.collect(0)  # the young ones: all of a process full of tests take a second each time
                rooms.next_turn()
            if (view != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and free(rooms) and rooms.used == 0


@pytest.mark.parametrize("refused", [False, True])
def test_near_a_gpu_memory_is_locked_before_it_is_used_unless_the_driver_refuses(monkeypatch, refused):
    asked = []

    class Locked(list):
        def is_pinned(self):
            return not refused

    def lock(memory, device):
        asked.append((memory.data_ptr(), device.type))
        return Locked()

    monkeypatch.setattr(module, "lock_pages", lock)
    rooms, gpu = Rooms(), torch.device("cuda")
    rooms.take(SIZE)
    assert asked == []
    places = [rooms.take(size, gpu).data_ptr() for size in (SIZE, SIZE)]
    assert [place for place, _ in asked] == places[: 1 if refused else 2]
    monkeypatch.setattr(module, "LOCKED_BYTES", SIZE)
    asked.clear()
    assert len(rooms.take(2 * SIZE, gpu)) == 2 * SIZE and asked == []


def test_a_round_finds_memory_that_is_there_and_that_stays(monkeypatch):
    rooms = Rooms()
    monkeypatch.setattr(module, "ROOMS", rooms)
    prepare(SIZE, torch.device("cpu"))
    assert len(free(rooms)) == ROUND_ROOMS
    whole_chunks = SIZE + SIZE // (2 * MARGIN)
    held = [room_for(whole_chunks) for _ in range(ROUND_ROOMS)]
    assert free(rooms) == []
    held.append(room_for(SIZE))
    del held
    assert len(free(rooms)) == ROUND_ROOMS + 1
    for _ in range(IDLE_TURNS + 2):
        rooms.next_turn()
    assert len(free(rooms)) == ROUND_ROOMS


def test_nothing_is_kept_for_small_vectors(monkeypatch):
    rooms = Rooms()
    monkeypatch.setattr(module, "ROOMS", rooms)
    prepare(WORTH_MAPPING - 1, torch.device("cpu"))
    assert free(rooms) == []


def test_what_lies_on_the_host_is_not_copied():
    payload = torch.ones(3, dtype=torch.uint8)
    assert on_host(payload) is payload


def test_small_memory_and_that_of_states_is_nobodys_afterwards():
    for room in (room_for(10), mapped(10), mapped(SIZE)):
        room.fill_(1)
        assert room.dtype == torch.uint8 and room.is_contiguous()
