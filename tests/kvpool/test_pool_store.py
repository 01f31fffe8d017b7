"""The store's calls: one that fails as a whole is followed by a pause, one that says something of a key is not."""

from types import SimpleNamespace

import pytest

from tailrace.kvpool import store as module
from tailrace.kvpool.block_check import CORRUPT
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.store import MAX_PIECES, PAUSED, PoolStore


class Client:
    """Mooncake's. `codes`: of each key in turn, then 0 or its bytes; an exception is raised."""

    def __init__(self, *codes):
        self.codes, self.calls, self.registered, self.closes, self.code = list(codes), [], [], 0, 0

    def _answers(self, name: str, keys: list[str], known) -> list[int]:
        self.calls.append((name, list(keys)))
        if self.codes and isinstance(self.codes[0], Exception):
            raise self.codes.pop(0)
        return [self.codes.pop(0) if self.codes else known(place) for place in range(len(keys))]

    def batch_is_exist(self, keys):
        return self._answers("exist", keys, lambda place: 1)

    def batch_put_from_multi_buffers(self, keys, addresses, sizes, config):
        assert config == "config" and len(addresses) == len(sizes) == len(keys)
        return self._answers("put", keys, lambda place: 0)

    def batch_get_into_multi_buffers(self, keys, addresses, sizes):
        assert len(addresses) == len(sizes) == len(keys)
        return self._answers("get", keys, lambda place: sum(sizes[place]))

    def batch_remove(self, keys, force):
        assert force is True
        self.calls.append(("remove", keys))

    def register_buffer(self, address, size):
        self.registered.append((address, size))
        return self.code

    def close(self):
        self.closes += 1


class Clock:
    """Seconds; each look takes `tick_s`."""

    def __init__(self):
        self.now_s, self.tick_s = 100.0, 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def made(*codes, check=None) -> tuple[PoolStore, Client, Clock, Counts]:
    client, clock, counts = Client(*codes), Clock(), Counts()
    return PoolStore(client, counts, 2.0, check, clock), client, clock, counts


def put(store: PoolStore, *keys: str) -> list[int]:
    return store.batch_put_from_multi_buffers(list(keys), [[0]] * len(keys), [[10, 20]] * len(keys), "config")


def get(store: PoolStore, *keys: str) -> list[int]:
    return store.batch_get_into_multi_buffers(list(keys), [[0]] * len(keys), [[10, 20]] * len(keys))


@pytest.mark.parametrize("code", [-800, -900, RuntimeError("the binding")])
def test_nothing_is_tried_for_a_while_after_the_pool_was_lost_and_then_it_is(code):
    store, client, clock, counts = made(1, code) if not isinstance(code, Exception) else made(code)
    first = store.batch_is_exist(["a", "b"])
    assert first in ([1, -800], [1, -900], [-900, -900])
    clock.now_s += 1.875
    assert (
        store.batch_is_exist(["c"]) == [PAUSED] and put(store, "d") == [PAUSED] and get(store, "e", "f") == [PAUSED] * 2
    )
    assert len(client.calls) == 1
    clock.now_s += 0.125
    assert store.batch_is_exist(["g"]) == [1] and len(client.calls) == 2, "the pause is over"
    found = counts.take()
    assert found["lookup_failed.paused"] == found["save_failed.paused"] == 1 and found["load_failed.paused"] == 2
    assert not found["saved_bytes"] and not found["loaded_bytes"]


def test_the_pause_begins_at_the_end_of_the_slow_call():
    store, _, clock, _ = made(-900)
    clock.tick_s = 4.0
    store.batch_is_exist(["a"])
    clock.tick_s = 0.0
    clock.now_s += 1.5
    assert store.batch_is_exist(["b"]) == [PAUSED]


@pytest.mark.parametrize(
    ("code", "cause"), [(-200, "full"), (-704, "gone"), (-707, "lease_expired"), (-123, "code_123")]
)
def test_a_key_that_fails_is_counted_by_its_cause_and_holds_nothing_up(code, cause):
    store, client, _, counts = made(0, code, 0)
    assert put(store, "a", "b", "c") == [0, code, 0] and put(store, "d") == [0]
    found = counts.take()
    assert found[f"save_failed.{cause}"] == 1 and found["saved_bytes"] == 90 and len(client.calls) == 2


def test_bytes_are_counted_of_what_was_read_and_each_call_by_its_time():
    store, _, clock, counts = made(30, -704, 30)
    clock.tick_s = 0.003
    assert get(store, "a", "b", "c") == [30, -704, 30]
    found = counts.take()
    assert found == {"loaded_bytes": 60, "load_failed.gone": 1, "load_ms.4": 1}


def test_a_large_call_is_cut_and_the_rest_of_it_is_not_tried_once_the_pool_is_lost():
    store, client, _, _ = made(0, -900)
    count = MAX_PIECES // 3
    keys = [str(number) for number in range(2 * count)]
    codes = put(store, *keys)
    assert [len(asked) for _, asked in client.calls] == [count]
    assert codes == [0, -900, *[0] * (count - 2), *[PAUSED] * count]


class Check:
    """Finds the blocks of these keys corrupt."""

    def __init__(self, register, corrupt=()):
        self.register, self.corrupt = register, corrupt

    def sealed(self, keys, addresses, sizes):
        return [[*one, 7] for one in addresses], [[*one, 8] for one in sizes]

    opened = sealed

    def judged(self, keys, addresses, sizes, results):
        return [CORRUPT if key in self.corrupt else code for key, code in zip(keys, results, strict=True)]


def test_a_corrupt_block_is_a_miss_is_counted_and_removed_and_no_other_is():
    store, client, _, counts = made(check=lambda register: Check(register, {"b"}))
    assert get(store, "a", "b", "c") == [38, CORRUPT, 38]
    assert client.calls == [("get", ["a", "b", "c"]), ("remove", ["b"])]
    assert counts.take()["load_failed.corrupt"] == 1
    assert get(store, "a") == [38] and len(client.calls) == 3
    assert put(store, "a") == [0], "a check is of no key alone"


def test_another_client_gets_the_memory_and_ends_the_pause(monkeypatch):
    timers = []

    def timer(seconds, work):
        timers.append(SimpleNamespace(seconds=seconds, work=work, daemon=False, starts=0))
        timers[-1].start = lambda: setattr(timers[-1], "starts", 1)
        return timers[-1]

    monkeypatch.setattr(module, "Timer", timer)
    store, former, _, _ = made(-900)
    assert store.register_buffer(1000, 64) == 0 and store.register_buffer(2000, 32) == 0
    store.batch_is_exist(["a"])
    bad, good = Client(), Client()
    bad.code = -7
    with pytest.raises(RuntimeError, match="does not take the KV cache: Mooncake says -7"):
        store.replace(bad)
    assert store.batch_is_exist(["a"]) == [PAUSED] and not timers, "the former one stays"
    store.replace(good)
    assert good.registered == former.registered == [(1000, 64), (2000, 32)]
    assert store.batch_is_exist(["a"]) == [1] and good.calls and len(former.calls) == 1
    (closing,) = timers
    assert (closing.seconds, closing.daemon, closing.starts) == (module.CLOSE_S, True, 1) and not former.closes
    closing.work()
    assert former.closes == 1
    store.close()
    assert good.closes == 1 and former.closes == 1
    store.register_buffer(3000, 16)
    assert good.registered[-1] == (3000, 16)
