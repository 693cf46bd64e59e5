"""An iterator run ahead by one thread."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_END = object()


class Prefetcher(Generic[T]):
    """Runs the iterator ``make(stop)`` in a thread, at most ``depth`` items ahead; its errors come out at the consumer.

    The thread holds no reference to this object, makes no MPI call, and ends when the iterator does, when ``close`` is
    called, or when this object is collected; an iterator with long pauses between items looks at ``stop`` itself.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[T]], depth: int, name: str):
        self._queue: queue.Queue = queue.Queue(max(depth, 1))
        self._stop = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=_run, args=(make, self._queue, self._stop), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        item, error = self._queue.get()
        if item is _END:
            self.close()
            if error is not None:
                raise error
            raise StopIteration
        return item

    def close(self) -> None:
        """Ends the thread and waits for it; may be called again."""
        self._over = True
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __del__(self) -> None:
        self._stop.set()


def _run(make: Callable[[threading.Event], Iterator], out: queue.Queue, stop: threading.Event) -> None:
    def put(item) -> bool:
        while not stop.is_set():
            try:
                out.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    error = None
    iterator = None
    try:
        iterator = make(stop)
        for item in iterator:
            if not put((item, None)):
                break
    except BaseException as caught:
        error = caught
    finally:
        if iterator is not None and hasattr(iterator, "close"):
            iterator.close()
    put((_END, error))
