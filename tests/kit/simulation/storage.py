"""Objects in memory: operations take time, fail before or after they have taken effect, and lists are late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from gemini_ft.errors import CorruptDataError, ObjectGoneError, StorageError
from gemini_ft.storage.base import UNCOUNTED, RangeReader, Steps, TransferCount, check_key
from simulation.loop import Fiber

URL = "s3://simulated/prefix"
READING = ".reading-"  # in the keys of readers' notes


def is_of_checkpoint(key: str) -> bool:
    """Whether an object is a shard or a manifest."""
    return "/shard" in key or key.endswith("/manifest.json")


class Bucket:
    """The store that all hosts share.

    Attributes:
        objects: by key.
        failing: probability with which an operation fails.
        lagging: probability with which a listing lacks an object that was written a moment ago.
        late: seconds for which it may lack it.
        slowness: seconds that an operation takes in the mean.
        halving: probability with which it says yes to an object, and keeps half of it.
        deleting: seconds that a deletion takes besides.
    """

    def __init__(self, rng: Random, record: Callable[..., None]) -> None:
        self.rng, self.record = rng, record
        self.objects: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        self._sound: dict[str, bytes] = {}  # what was in objects that are damaged
        self.failing, self.lagging, self.late, self.slowness = 0.0, 0.0, 5.0, 0.02
        self.halving = self.deleting = 0.0
        self.away: set[str] = set()  # hosts that do not reach it
        self.down = False

    def hidden(self, now: float) -> list[str]:
        """The keys of objects that lists may lack now."""
        return [key for key, at in self._written.items() if self.lagging and now - at < self.late]

    def rot(self) -> None:
        """A bit of an object flips."""
        if keys := sorted(filter(is_of_checkpoint, self.objects)):
            key = self.rng.choice(keys)
            body = bytearray(self.objects[key])
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
            self._sound.setdefault(key, self.objects[key])
            self.objects[key] = bytes(body)
            self.record("rot", key=key)

    def mend(self) -> None:
        """Makes good what is damaged: without memory, a job does not go on while no checkpoint is sound."""
        for key, body in self._sound.items():
            if key in self.objects:
                self.objects[key] = body
                self.record("mended", key=key)
        self._sound.clear()


class SimulatedStorage:
    """A host's view of the bucket; implements `gemini_ft.storage.base.Storage`."""

    url = URL
    is_one_place = True

    def __init__(self, bucket: Bucket, deletes: bool) -> None:
        self._bucket, self._deletes = bucket, deletes

    def _operate(self, what: str, effect: Callable[[], Any]) -> Any:
        """Takes its time, and may fail although it has taken effect, as where the answer is lost."""
        fiber, bucket = Fiber.here(), self._bucket
        assert fiber is not None, f"{what} would stop the agent's loop"
        fiber.sleep(bucket.rng.expovariate(1 / bucket.slowness))
        fails = bucket.down or fiber.process.host in bucket.away or bucket.rng.random() < bucket.failing
        if fails and (bucket.down or bucket.rng.random() < 0.6):
            fiber.sleep(bucket.rng.expovariate(1.0))
            raise StorageError(f"{self.url}: {what}: 503")
        result = effect()
        fiber.sleep(bucket.rng.expovariate(1 / bucket.slowness))
        if fails:
            raise StorageError(f"{self.url}: {what}: the answer was lost")
        return result

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        check_key(key)
        self._bucket.record("putting", key=key)
        body = bytearray()
        for part in parts:
            body += part
            fiber = Fiber.here()
            assert fiber is not None
            fiber.sleep(self._bucket.rng.expovariate(1 / (0.2 * self._bucket.slowness)))

        def effect() -> None:
            self._bucket.objects[key] = bytes(body)
            self._bucket._sound.pop(key, None)
            fiber = Fiber.here()
            assert fiber is not None
            self._bucket._written[key] = fiber.loop.time()
            self._bucket.record("put", key=key)
            if is_of_checkpoint(key) and self._bucket.rng.random() < self._bucket.halving:
                self._bucket.objects[key], self._bucket._sound[key] = bytes(body[: len(body) // 2]), bytes(body)
                self._bucket.record("halved", key=key)
            transfer.add(len(body))

        self._operate(f"put {key}", effect)

    def get(self, key: str) -> bytes:
        def effect() -> bytes:
            if key not in self._bucket.objects:
                raise ObjectGoneError(f"{self.url}: {key} is not there")
            return self._bucket.objects[key]

        found: bytes = self._operate(f"get {key}", effect)
        return found

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        body = self.get(key)[offset : offset + out.nbytes]
        if len(body) < out.nbytes:
            raise CorruptDataError(f"{self.url}: {key} ends at {offset + len(body)}")
        out[:] = body

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        return Steps(self, key, offset)

    def list(self, prefix: str = "") -> Sequence[str]:
        self._bucket.record("listing", key=prefix)

        def effect() -> list[str]:
            bucket, fiber = self._bucket, Fiber.here()
            assert fiber is not None
            hidden = {key for key in bucket.hidden(fiber.loop.time()) if bucket.rng.random() < bucket.lagging}
            seen = sorted(key for key in bucket.objects if key.startswith(prefix) and key not in hidden)
            if READING in prefix:
                bucket.record("looked", key=prefix, seen=seen)
            return seen

        found: list[str] = self._operate(f"list {prefix}", effect)
        return found

    def delete(self, key: str) -> None:
        def effect() -> None:
            if key in self._bucket.objects:
                self._bucket.record("delete", key=key)
                del self._bucket.objects[key]

        fiber = Fiber.here()
        assert fiber is not None
        fiber.sleep(self._bucket.deleting * self._bucket.rng.random())
        if self._deletes:
            self._operate(f"delete {key}", effect)

    def check(self) -> None:
        self._operate("check", lambda: None)
